"""Which language a verb speaks: --lang, else the locale of the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Language = Literal["en", "zh"]


def language_of(asked: Language | None, environ: Mapping[str, str]) -> Language:
    """`asked`, else Chinese where LC_ALL, LC_MESSAGES or LANG (the first that is set) is Chinese, else English."""
    if asked is not None:
        return asked
    locale = next((environ[name] for name in ("LC_ALL", "LC_MESSAGES", "LANG") if environ.get(name)), "")
    return "zh" if locale.lower().startswith("zh") else "en"
