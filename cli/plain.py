"""Text of others on its way to a terminal."""

from __future__ import annotations

import re

_COLOUR = r"\x1b\[[0-9;]*m"
_OBEYED = re.compile(rf"(?!{_COLOUR})[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
"""What a terminal obeys, or turns around. Lines, tabs and colours stay."""


def plain(text: str) -> str:
    """Text that a server, a file or the owner of a key may have had a hand in, without what a terminal would obey."""
    return _OBEYED.sub("?", text)
