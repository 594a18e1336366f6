"""Pages of the KV cache: a fixed number, each free or used by one request.

Invariant: free + used = all. A page that waits to be found again (prefix cache) will be a third state beside these two.
"""

from __future__ import annotations


class Pages:
    """The pool of KV pages. Not thread-safe: the scheduler alone takes and gives back."""

    def __init__(self, count: int, page_size: int) -> None:
        """`count` pages of `page_size` tokens each."""
        if count < 1:
            raise ValueError(f"a KV cache of {count} pages can hold nothing: it needs at least 1")
        self.count = count
        self.page_size = page_size
        self._free = list(range(count - 1, -1, -1))
        self._is_used = bytearray(count)

    @property
    def free(self) -> int:
        """Pages that can be taken."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Pages that requests hold."""
        return self.count - len(self._free)

    def needed(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        return -(-tokens // self.page_size)

    def can_take(self, pages: int) -> bool:
        """Whether `take(pages)` would succeed."""
        return pages <= len(self._free)

    def take(self, pages: int) -> list[int]:
        """Page numbers for one owner. The page given back last is taken first, while it is warm in the caches."""
        if not self.can_take(pages):
            raise RuntimeError(f"{pages} KV pages were asked for and {self.free} of {self.count} are free")
        taken = [self._free.pop() for _ in range(pages)]
        for page in taken:
            self._is_used[page] = 1
        return taken

    def give_back(self, pages: list[int]) -> None:
        """Frees pages. Giving one back twice would let two requests write the same page, so it is refused."""
        for page in pages:
            if not self._is_used[page]:
                raise RuntimeError(f"KV page {page} was given back twice")
            self._is_used[page] = 0
        self._free.extend(reversed(pages))

    def check(self) -> None:
        """Raises when the invariant is broken."""
        if len(set(self._free)) != len(self._free) or sum(self._is_used) != self.used:
            raise RuntimeError(f"KV pages are lost or doubled: {self.free} free and {self.used} used of {self.count}")
