"""Which language a page is in, and its texts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dashboards.console import chinese, english
from tracing.observer.texts import Language

LANGUAGES: Mapping[Language, Mapping[str, str]] = {"en": english.TEXTS, "zh": chinese.TEXTS}
HTML_LANG = {"en": "en", "zh": "zh-Hans"}
_CHOICE = re.compile(r"\s*([A-Za-z]+)[A-Za-z0-9-]*\s*(?:;\s*q=([0-9.]+))?\s*\Z")


def language(asked: str, accept_language: str) -> Language:
    """The language that `?lang=` names, else the best known one of `Accept-Language`, else English."""
    for known in LANGUAGES:
        if asked == known:
            return known
    best: Language = "en"
    best_weight = 0.0
    for choice in accept_language[:200].split(","):
        found = _CHOICE.match(choice)
        named = [known for known in LANGUAGES if found is not None and found[1].lower() == known]
        if found is None or not named:
            continue
        try:
            weight = float(found[2] or 1)
        except ValueError:
            continue
        if weight > best_weight:
            best, best_weight = named[0], weight
    return best


class Texts:
    """The texts of one language."""

    def __init__(self, lang: Language) -> None:
        self.lang = lang
        self.html_lang = HTML_LANG[lang]
        self._texts = LANGUAGES[lang]

    def __call__(self, key: str, **values: Any) -> str:
        """The text with its `{places}` filled. A value stands as it is: braces in it mean nothing."""
        text = self._texts[key]
        return text.format(**values) if values else text

    def has(self, key: str) -> bool:
        """Whether there are words for this name."""
        return key in self._texts

    def or_else(self, key: str, default: str) -> str:
        """The text, or `default` for a name that this version has no words for."""
        return self._texts.get(key, default)
