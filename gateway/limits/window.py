"""Counting over a sliding minute in a ring of one-second slots: bounded memory, and never more than the limit.

A slot counts until all of it is older than a minute. What is counted thus spans 60 to 61 seconds, so that in no 60
seconds more than the limit is let through. `script.py` does the same arithmetic inside Redis.
"""

from __future__ import annotations

from array import array

WINDOW_SECONDS = 60
SLOTS = WINDOW_SECONDS + 1
SLOT_NS = 1_000_000_000


class SlidingWindow:
    """Amounts of the last minute. Times are monotonic ns and never go back."""

    __slots__ = ("_current", "_newest", "_ring", "_total")

    def __init__(self) -> None:
        self._ring = array("q", bytes(8 * SLOTS))
        self._total = 0
        self._current = 0
        """Number of the slot that the ring has been brought up to."""
        self._newest = 0
        """Number of the last slot that something was added to."""

    def add(self, now_ns: int, amount: int) -> None:
        """Counts `amount` now."""
        self._advance(now_ns)
        self._ring[self._current % SLOTS] += amount
        self._total += amount
        self._newest = self._current

    def total(self, now_ns: int) -> int:
        """What was counted in the last minute."""
        self._advance(now_ns)
        return self._total

    def below_in_ns(self, now_ns: int, limit: int) -> int:
        """How long until less than `limit` is counted, if nothing is added; 0: it is so already."""
        left = self.total(now_ns)
        for slot in range(self._current - SLOTS + 1, self._current + 1):
            if left < limit:
                break
            amount = self._ring[slot % SLOTS]
            left -= amount
            if amount and left < limit:
                return (slot + SLOTS) * SLOT_NS - now_ns
        return 0

    def empty_in_ns(self, now_ns: int) -> int:
        """How long until nothing is counted, if nothing is added."""
        return (self._newest + SLOTS) * SLOT_NS - now_ns if self.total(now_ns) else 0

    def _advance(self, now_ns: int) -> None:
        """Empties the slots that have grown older than a minute."""
        slot = now_ns // SLOT_NS
        if slot <= self._current:
            return
        if slot - self._current >= SLOTS:
            self._ring = array("q", bytes(8 * SLOTS))
            self._total = 0
        else:
            for passed in range(self._current + 1, slot + 1):
                self._total -= self._ring[passed % SLOTS]
                self._ring[passed % SLOTS] = 0
        self._current = slot
