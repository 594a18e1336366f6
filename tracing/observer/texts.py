"""Texts in English and Simplified Chinese: `texts.LANGUAGE.json` beside this file, with the same keys and placeholders.

`{name}` is replaced by a written value. A part in `[square brackets]` is left out when a value in it is unknown;
elsewhere the unknown is written `-`. Each row of the table of causes has `reason.NAME` and `advice.NAME`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Literal, get_args

Language = Literal["en", "zh"]
LANGUAGES: tuple[Language, ...] = get_args(Language)
UNKNOWN = "-"

_PLACEHOLDER = re.compile(r"\{([a-z0-9_.]+)\}")
_OPTIONAL = re.compile(r"\[([^\]]*)\]")


@cache
def texts(language: Language) -> Mapping[str, str]:
    """Every text of a language, as written in its file."""
    found: dict[str, str] = json.loads(files(__package__).joinpath(f"texts.{language}.json").read_text("utf-8"))
    return found


def write(language: Language, key: str, values: Mapping[str, str | None]) -> str:
    """The text with its values; None and absent ones are unknown."""

    def optional(part: re.Match[str]) -> str:
        names = _PLACEHOLDER.findall(part[1])
        return part[1] if all(values.get(name) is not None for name in names) else ""

    text = _OPTIONAL.sub(optional, texts(language)[key])
    return _PLACEHOLDER.sub(lambda found: values.get(found[1]) or UNKNOWN, text)


def placeholders(text: str) -> set[str]:
    """Names of the values in a text."""
    return set(_PLACEHOLDER.findall(text))


def duration(seconds: float) -> str:
    """A time as people read it: 0.42 ms, 38.1 ms, 120 ms, 2.35 s."""
    ms = seconds * 1e3
    if abs(ms) >= 1000:
        return f"{seconds:.2f} s"
    return f"{ms:.0f} ms" if abs(ms) >= 100 else f"{ms:.1f} ms" if abs(ms) >= 1 else f"{ms:.2f} ms"


def share(part: float) -> str:
    """A share as people read it."""
    return f"{part * 100:.0f} %"
