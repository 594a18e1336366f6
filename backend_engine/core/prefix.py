"""Keys of a sequence's full pages: each depends on all tokens up to its page's end, so equal keys mean equal starts."""

from __future__ import annotations

import sys
from array import array
from hashlib import blake2b

_KEY_BYTES = 16
"""128 bits: nobody meets two beginnings of the same key by chance, and who looks for some needs 2^64 tries."""


class PageKeys:
    """The chain of one sequence. `tokens` belongs to the sequence and only grows."""

    def __init__(self, tokens: list[int], page_size: int) -> None:
        self._tokens = tokens
        self._page_size = page_size
        self._keys: list[bytes] = []

    def first(self, pages: int) -> list[bytes]:
        """Keys of the first `pages` pages, all of whose tokens must be there."""
        size = self._page_size
        while len(self._keys) < pages:
            start = len(self._keys) * size
            tokens = array("i", self._tokens[start : start + size])
            if sys.byteorder == "big":
                tokens.byteswap()
            before = self._keys[-1] if self._keys else b""
            self._keys.append(blake2b(tokens.tobytes(), digest_size=_KEY_BYTES, key=before).digest())
        return self._keys[:pages]
