"""Words for findings, in English and Simplified Chinese."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from loadtest.doctor import chinese, english
from loadtest.doctor.finding import Finding, Value

Language = Literal["en", "zh"]
LANGUAGES: Mapping[Language, Mapping[str, tuple[str, str]]] = {"en": english.TEXTS, "zh": chinese.TEXTS}
STRAYS: Mapping[Language, Mapping[str, str]] = {"en": english.STRAYS, "zh": chinese.STRAYS}


def words_of(finding: Finding, language: Language) -> tuple[str, str]:
    """What was seen and what to do; the second is empty where nothing is to be done."""
    seen, fix = LANGUAGES[language][finding.code]
    values = {name: _printable(value) for name, value in finding.values.items()}
    if "what" in values:
        values["what"] = STRAYS[language][str(values["what"])]
    return seen.format(**values), fix.format(**values)


def _printable(value: Value) -> Value:
    """A server's words, without what a terminal would obey."""
    if not isinstance(value, str):
        return value
    return "".join(character if character.isprintable() else "?" for character in value)
