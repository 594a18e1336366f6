"""Requests of two groups that met the same conditions: they tell what the engine did from what the traffic did."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from loadtest.server_side import ServerSide

Value = Callable[[ServerSide], float | None]


class Condition(NamedTuple):
    """Something that a time depends on, and how near two requests must be in it to be alike."""

    name: str
    value: Value
    share: float
    least: float

    def are_alike(self, a: float, b: float) -> bool:
        """Whether the two differ by no more than a share of the first, or by `least`."""
        return abs(a - b) <= max(self.share * abs(a), self.least)


PROMPT = Condition("computed prompt tokens", lambda one: one.computed_tokens, 0.1, 8)
COMPANY = Condition("requests running in the engine", lambda one: one.engine_running, 0.2, 1)
BATCH = Condition("mean batch", lambda one: one.mean_batch, 0.2, 0.5)


def alike(
    a: Sequence[ServerSide], b: Sequence[ServerSide], value: Value, conditions: Sequence[Condition], rng: random.Random
) -> tuple[list[float], list[float]]:
    """The values of `b` whose conditions some of `a` met, and for each one of those of `a`: pairs, apart.

    So both lists met the same conditions equally often, whatever the rest of the two groups met.
    """
    found: dict[tuple[float, ...], list[float]] = {}
    for one in a:
        at, took = _conditions(one, conditions), value(one)
        if at is not None and took is not None:
            found.setdefault(at, []).append(took)
    partners: dict[tuple[float, ...], list[float]] = {}
    from_a, from_b = [], []
    for one in b:
        at, took = _conditions(one, conditions), value(one)
        if at is None or took is None:
            continue
        if at not in partners:
            partners[at] = [
                other
                for place, values in found.items()
                if all(c.are_alike(x, y) for c, x, y in zip(conditions, place, at, strict=True))
                for other in values
            ]
        if partners[at]:
            from_a.append(rng.choice(partners[at]))
            from_b.append(took)
    return from_a, from_b


def _conditions(one: ServerSide, conditions: Sequence[Condition]) -> tuple[float, ...] | None:
    """Rounded to a fifth of what may differ, so that there are few of them; None where one is not known."""
    values = []
    for condition in conditions:
        value = condition.value(one)
        if value is None:
            return None
        step = max(condition.share * abs(value), condition.least) / 5
        values.append(round(value / step) * step)
    return tuple(values)
