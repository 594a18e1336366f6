"""Pages of the KV cache: a fixed number, each free, cached or used.

A page is used while requests hold it, and several may hold one whose content they share. A page whose content has a key
(see `core/prefix.py`) is kept as cached when its last holder gives it back, until it is found again or the space is
needed; the one that nobody asked for longest goes first. Invariant: free + cached + used = all.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class Pages:
    """The pool of KV pages. Not thread-safe: the scheduler alone takes and gives back."""

    def __init__(self, count: int, page_size: int) -> None:
        """`count` pages of `page_size` tokens each."""
        if count < 1:
            raise ValueError(f"a KV cache of {count} pages can hold nothing: it needs at least 1")
        self.count = count
        self.page_size = page_size
        self.evictions = 0
        """Cached pages that were given to another use so far."""
        self._free = list(range(count - 1, -1, -1))
        self._holders = [0] * count
        self._key_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # from the one not asked for longest

    @property
    def free(self) -> int:
        """Pages that hold nothing."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Pages that nobody holds and that may be found again."""
        return len(self._cached)

    @property
    def used(self) -> int:
        """Pages that requests hold."""
        return self.count - len(self._free) - len(self._cached)

    def needed(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        return -(-tokens // self.page_size)

    def can_take(self, pages: int) -> bool:
        """Whether `take(pages)` would succeed."""
        return pages <= len(self._free) + len(self._cached)

    def take(self, pages: int) -> list[int]:
        """Page numbers for one owner, to write. The page given back last is taken first, while it is warm in the
        processor's caches; cached ones only when none is free."""
        if not self.can_take(pages):
            raise RuntimeError(
                f"{pages} KV pages were asked for; {self.free} are free and {self.cached} cached of {self.count}"
            )
        taken = [self._free.pop() if self._free else self._evict() for _ in range(pages)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """Pages that hold the longest known beginning of `keys`. They are not taken yet: see `share`."""
        found: list[int] = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            found.append(page)
        return found

    def share(self, pages: Sequence[int]) -> None:
        """One more holder of pages that were found, to read."""
        for page in pages:
            self._holders[page] += 1
            self._cached.pop(page, None)

    def register(self, page: int, key: bytes) -> None:
        """Says what a used page holds, once all of it is written. When another page holds the same, that one is found
        by the key and this one stays its owner's alone: a sequence never changes pages under a step in flight."""
        if not self._holders[page]:
            raise RuntimeError(f"KV page {page} has no holder, so nobody can know what it holds")
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def give_back(self, pages: Sequence[int]) -> None:
        """One holder less of each. A sequence's last pages are evicted before its first, which more prompts share."""
        for page in reversed(pages):
            if not self._holders[page]:
                raise RuntimeError(f"KV page {page} was given back twice")
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            if page in self._key_of:
                self._cached[page] = None
            else:
                self._free.append(page)

    def check(self) -> None:
        """Raises when the invariant is broken."""
        free, held = set(self._free), {page for page, holders in enumerate(self._holders) if holders}
        is_parted = len(free) == len(self._free) and not (free & held or free & self._cached.keys())
        is_whole = len(free) + len(held) + len(self._cached) == self.count and not held & self._cached.keys()
        is_known = self._cached.keys() <= self._key_of.keys() and len(self._key_of) == len(self._page_of)
        if not (is_parted and is_whole and is_known):
            raise RuntimeError(
                f"KV pages are lost or doubled: {self.free} free, {self.cached} cached and {len(held)} used "
                f"of {self.count}"
            )

    def _evict(self) -> int:
        page, _ = self._cached.popitem(last=False)
        del self._page_of[self._key_of.pop(page)]
        self.evictions += 1
        return page
