"""Windows of time as people write them: 90s, 15m, 1h, 7d."""

from __future__ import annotations

import re

_WINDOW = re.compile(r"(\d{1,9})([smhd])\Z")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def window_ns(text: str) -> int:
    """Nanoseconds of a window. Raises ValueError that says how to write one."""
    found = _WINDOW.match(text.strip())
    if not found or not int(found[1]):
        raise ValueError(f"window={text!r} is not a time; write a number and s, m, h or d, like 90s, 15m, 1h, 7d")
    return int(found[1]) * _SECONDS[found[2]] * 1_000_000_000
