"""What is asked: prompts of known length made on the spot, or a user's own from a file."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.calibration import Lexicon
from settings.errors import SettingsError

MAX_FILE_BYTES = 512 * 2**20
_PART = re.compile(r"([a-z]+)(?::(\d+(?:\.\d+)?))?\Z")

Message = dict[str, Any]
Maker = Callable[[], "Prompt"]
"""Gives the next prompt; every call another one."""


@dataclass(frozen=True)
class Prompt:
    """One request's messages, and how many tokens they are meant to be (0: not known beforehand)."""

    messages: Sequence[Message]
    tokens: int = 0
    group: str = ""
    max_output_tokens: int | None = None


@dataclass(frozen=True)
class Size:
    """A class of prompts, by tokens, with its share of the traffic."""

    name: str
    tokens: int
    weight: float = 1.0


def parse_mix(text: str, tokens: dict[str, int]) -> tuple[Size, ...]:
    """Sizes of `short,long` or `short:0.8,long:0.2`; `tokens` says how long each is. Raises SettingsError."""
    sizes = []
    for part in text.split(","):
        found = _PART.match(part.strip())
        if not found or found[1] not in tokens or (found[2] and not float(found[2])):
            raise SettingsError(
                f"--mix: {part.strip()!r}: write {' and '.join(tokens)}, with shares if they differ: short:0.8,long:0.2"
            )
        sizes.append(Size(found[1], tokens[found[1]], float(found[2] or 1)))
    if len({size.name for size in sizes}) < len(sizes):
        raise SettingsError(f"--mix {text!r}: a size is named twice")
    return tuple(sizes)


class MadePrompts:
    """Prompts of a wanted length. Beyond a shared beginning, no two begin alike: no cache of prefixes helps them."""

    def __init__(self, lexicon: Lexicon, sizes: Sequence[Size], shared_tokens: int, rng: random.Random) -> None:
        self._lexicon = lexicon
        self.sizes = list(sizes)
        self._rng = rng
        shortest = min(size.tokens for size in sizes)
        least = lexicon.overhead + lexicon.least
        if shortest < least:
            raise SettingsError(
                f"a prompt of {shortest} tokens can't be made: the chat template and a few words are {least} already"
            )
        if shared_tokens and shared_tokens > shortest - least:
            raise SettingsError(
                f"workload.shared_prefix_tokens = {shared_tokens}: prompts of {shortest} tokens "
                f"have room for {shortest - least}"
            )
        self._shared = lexicon.words(shared_tokens, random.Random(0)) if shared_tokens else []  # noqa: S311
        self._shared_tokens = lexicon.cost_of(self._shared)

    def __call__(self) -> Prompt:
        size = self._rng.choices(self.sizes, [size.weight for size in self.sizes])[0]
        return self.of(size)

    def of(self, size: Size) -> Prompt:
        """The next prompt of one size."""
        words = self._lexicon.words(
            size.tokens - self._lexicon.overhead - self._shared_tokens, self._rng, begins=not self._shared
        )
        text = self._lexicon.text([*self._shared, *words])
        return Prompt(({"role": "user", "content": text},), size.tokens, size.name)


class FilePrompts:
    """A user's own prompts, in the file's order, over and over."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._prompts = list(prompts)
        self._next = 0

    def __len__(self) -> int:
        return len(self._prompts)

    def __call__(self) -> Prompt:
        prompt = self._prompts[self._next % len(self._prompts)]
        self._next += 1
        return prompt


def read_prompts(file: Path) -> FilePrompts:
    """Prompts of a JSONL file (`prompt`, `text` or `messages` a line, or a string) or a ShareGPT-shaped JSON list."""
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise SettingsError(f"{file}: larger than {MAX_FILE_BYTES >> 20} MiB")
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{file}: can't be read: {error}") from None
    prompts = [_prompt_of(row, place) for row, place in _rows(file, text)]
    if not prompts:
        raise SettingsError(f"{file}: holds no prompt")
    return FilePrompts(prompts)


def _rows(file: Path, text: str) -> list[tuple[Any, str]]:
    if text.lstrip().startswith("["):
        try:
            return [(row, f"{file}: entry {number}") for number, row in enumerate(json.loads(text), 1)]
        except ValueError as error:
            raise SettingsError(f"{file}: not valid JSON: {error}") from None
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                rows.append((json.loads(line), f"{file}:{number}"))
            except ValueError as error:
                raise SettingsError(f"{file}:{number}: not valid JSON: {error}") from None
    return rows


def _prompt_of(row: Any, place: str) -> Prompt:
    if isinstance(row, str):
        row = {"prompt": row}
    if isinstance(row, dict):
        limit = row.get("max_tokens")
        limit = limit if isinstance(limit, int) and limit > 0 else None
        messages = row.get("messages")
        if isinstance(messages, list) and messages and all(isinstance(m, dict) and "role" in m for m in messages):
            return Prompt(messages, group=_group(row), max_output_tokens=limit)
        text = row.get("prompt", row.get("text")) or _first_human(row.get("conversations"))
        if isinstance(text, str) and text:
            return Prompt(({"role": "user", "content": text},), group=_group(row), max_output_tokens=limit)
    raise SettingsError(f"{place}: has neither prompt, text, messages nor conversations with a human's turn")


def _group(row: dict[str, Any]) -> str:
    return str(row["group"])[:40] if isinstance(row.get("group"), str) else ""


def _first_human(conversations: Any) -> str | None:
    if not isinstance(conversations, list):
        return None
    for turn in conversations:
        if isinstance(turn, dict) and turn.get("from", turn.get("role")) in ("human", "user"):
            value = turn.get("value", turn.get("content"))
            return value if isinstance(value, str) and value else None
    return None
