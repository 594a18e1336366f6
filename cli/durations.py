"""Lengths of time as they are typed: 90s, 15m, 12h, 30d, 2w."""

from __future__ import annotations

import re

from cli.errors import CliError, Exit

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smhdw])\Z")


def seconds_of(option: str, text: str) -> float:
    """Seconds of `30d`; an error that names the option when it isn't one."""
    found = _DURATION.match(text.strip().lower())
    if not found or not float(found[1]):
        raise CliError(f"{option} {text!r}: write a number and a unit (s, m, h, d, w), such as 1h or 30d", Exit.USAGE)
    return float(found[1]) * _UNITS[found[2]]


def window_of(option: str, text: str) -> str:
    """How a length of time is written to the admin API: as it was typed where that is known there, else in seconds."""
    seconds = seconds_of(option, text)
    typed = text.strip().lower()
    return typed if re.fullmatch(r"\d+[smhd]", typed) else f"{max(1, round(seconds))}s"
