"""Words whose cost in tokens is known, so that prompts of an exact length can be made without asking for each.

Most tokenizers split at spaces first, so the tokens of a text of plain words are the sum of its words' tokens. That is
measured at the endpoint's own /tokenize, and a few whole prompts are counted there to prove it.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

Count = Callable[[str], Awaitable[int]]

WORDS = [
    "time",
    "year",
    "people",
    "way",
    "day",
    "man",
    "thing",
    "woman",
    "life",
    "child",
    "world",
    "school",
    "state",
    "family",
    "student",
    "group",
    "country",
    "problem",
    "hand",
    "part",
    "place",
    "case",
    "week",
    "company",
    "system",
    "program",
    "question",
    "work",
    "government",
    "number",
    "night",
    "point",
    "home",
    "water",
    "room",
    "mother",
    "area",
    "money",
    "story",
    "fact",
    "month",
    "lot",
    "right",
    "study",
    "book",
    "eye",
    "job",
    "word",
    "business",
    "issue",
    "side",
    "kind",
    "head",
    "house",
    "service",
    "friend",
    "father",
    "power",
    "hour",
    "game",
    "line",
    "end",
    "member",
    "law",
    "car",
    "city",
    "name",
    "team",
    "minute",
    "idea",
    "body",
    "back",
    "parent",
    "face",
    "others",
    "level",
    "office",
    "door",
    "health",
    "person",
    "art",
    "war",
    "history",
    "party",
    "result",
    "change",
    "morning",
    "reason",
    "girl",
    "guy",
    "moment",
    "air",
    "teacher",
    "force",
    "a",
    "I",
]
REPEATED = 8
"""Copies by which a word is weighed: a cost that is not the same for each copy shows as a fraction."""
PROOFS = 4


@dataclass(frozen=True)
class Lexicon:
    """Words with their cost in tokens, a space before each included."""

    costs: dict[str, int]
    overhead: int
    """Tokens of an empty chat: the template, less what the first word costs less for want of a space."""
    is_exact: bool
    how: str
    """How lengths are known, in words."""
    beginners: frozenset[str] | None = None
    """Words that may come first, where `overhead` holds of them; None: all."""
    _by_cost: dict[int, list[str]] = field(init=False, repr=False)
    _reachable: list[bool] = field(init=False, repr=False)
    _unit: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        by_cost: dict[int, list[str]] = {}
        for word, cost in self.costs.items():
            by_cost.setdefault(cost, []).append(word)
        object.__setattr__(self, "_by_cost", by_cost)
        object.__setattr__(self, "_reachable", _reachable(sorted(by_cost)))
        object.__setattr__(self, "_unit", math.gcd(*by_cost))

    @property
    def least(self) -> int:
        """From this many tokens on, every length can be made that is a multiple of what all words' costs share."""
        impossible = [t for t, can in enumerate(self._reachable) if not can and t % self._unit == 0]
        return impossible[-1] + self._unit if impossible else self._unit

    def cost_of(self, words: Sequence[str]) -> int:
        return sum(self.costs[word] for word in words)

    def words(self, tokens: int, rng: random.Random, *, begins: bool = True) -> list[str]:
        """Random words that cost exactly `tokens` together, `begins` at a text's beginning. Raises ValueError."""
        chosen: list[str] = []
        if begins and self.beginners is not None and tokens > 0:
            fitting_first = sorted(w for w in self.beginners if self._can_make(tokens - self.costs[w]))
            if not fitting_first:
                raise ValueError(f"no words cost {tokens} tokens")
            chosen.append(rng.choice(fitting_first))
            tokens -= self.costs[chosen[0]]
        while tokens > 0:
            fitting = [cost for cost in self._by_cost if self._can_make(tokens - cost)]
            if not fitting:
                raise ValueError(f"no words cost {tokens} tokens")
            # Each word is as likely as any other that leaves a rest which can be made.
            cost = rng.choices(fitting, [len(self._by_cost[cost]) for cost in fitting])[0]
            chosen.append(rng.choice(self._by_cost[cost]))
            tokens -= cost
        return chosen

    def _can_make(self, tokens: int) -> bool:
        if tokens >= len(self._reachable):
            return tokens % self._unit == 0
        return tokens >= 0 and self._reachable[tokens]

    @staticmethod
    def text(words: Sequence[str]) -> str:
        return " ".join(words)


async def calibrate(count: Count, by: str = "the endpoint's /tokenize", at_once: int = 8) -> Lexicon:
    """Weighs the words by `count`, the tokens of a chat whose one message is a text. Passes on what `count` raises."""
    base = await count("the")
    gate = asyncio.Semaphore(at_once)

    async def weigh(word: str) -> float:
        async with gate:
            return (await count("the" + f" {word}" * REPEATED) - base) / REPEATED

    weights = await asyncio.gather(*(weigh(word) for word in WORDS))
    costs = {word: int(weight) for word, weight in zip(WORDS, weights, strict=True) if weight >= 1 and weight % 1 == 0}
    if len(costs) < len(WORDS) // 2 or math.gcd(*costs.values()) > 1:
        return approximate(f"the words' tokens don't add up by {by}")

    async def weigh_first(word: str) -> int:
        async with gate:
            return await count(word) - costs[word]

    # A text's first word has no space before it, which many words cost less for, and some more.
    without_space = await asyncio.gather(*(weigh_first(word) for word in costs))
    overhead = max(set(without_space), key=without_space.count)
    beginners = frozenset(word for word, rest in zip(costs, without_space, strict=True) if rest == overhead)
    lexicon = Lexicon(costs, overhead, True, f"exact, by {by}", beginners)
    rng = random.Random(0)  # noqa: S311
    for number in range(PROOFS):
        wanted = lexicon.least + 40 * (number + 1)
        if await count(lexicon.text(lexicon.words(wanted, rng))) != wanted + overhead:
            return approximate(f"the words' tokens don't add up by {by}")
    return lexicon


def approximate(reason: str) -> Lexicon:
    """Lengths by a rule of thumb; what they really were, the answers' usage says."""
    costs = dict.fromkeys(WORDS, 1)
    return Lexicon(costs, 8, False, f"approximate, about one token a word: {reason}; usage says the true length")


def _reachable(costs: list[int]) -> list[bool]:
    """For each total whether words of these costs make it, up to where only their common divisor decides."""
    table = [True]
    for total in range(1, max(costs) * max(costs) + 1):
        table.append(any(cost <= total and table[total - cost] for cost in costs))
    return table
