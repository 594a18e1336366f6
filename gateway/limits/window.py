"""Counting over a sliding minute in a ring of one-second slots: bounded memory, and never more than the limit.

A slot counts until all of it is older than a minute. What is counted thus spans 60 to 61 seconds, so that in no 60
seconds more than the limit is let through. `script.py` does the same arithmetic inside Redis.

A window may lie in memory that other processes read (`board.py`). One process alone writes it; the order of its writes
is such that whoever reads meanwhile sees too much rather than too little.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

WINDOW_SECONDS = 60
SLOTS = WINDOW_SECONDS + 1
SLOT_NS = 1_000_000_000
WORDS = 3 + SLOTS
"""Of a window: the slot that it has been brought up to, the total, the last slot that was added to, the ring."""

_CURRENT, _TOTAL, _NEWEST, _RING = range(4)
_EMPTY_RING = array("q", bytes(8 * SLOTS))

READS = 4
"""Looks at a window that changes all the while; then nothing of it is taken to be over."""

Words = memoryview
"""64-bit integers."""


class SlidingWindow:
    """Amounts of the last minute. Times are monotonic ns and never go back."""

    __slots__ = ("_words",)

    def __init__(self, words: Words | None = None) -> None:
        self._words = memoryview(array("q", bytes(8 * WORDS))) if words is None else words

    def take_back(self, amount: int, newest: int) -> None:
        """Undoes the last `add`; `newest` is as it was before."""
        words = self._words
        words[_RING + words[_CURRENT] % SLOTS] -= amount
        words[_TOTAL] -= amount
        words[_NEWEST] = newest

    def add(self, now_ns: int, amount: int) -> None:
        """Counts `amount` now."""
        words = self._words
        self._advance(now_ns)
        current = words[_CURRENT]
        words[_RING + current % SLOTS] += amount
        words[_TOTAL] += amount
        words[_NEWEST] = current

    def total(self, now_ns: int) -> int:
        """What was counted in the last minute."""
        self._advance(now_ns)
        return self._words[_TOTAL]

    def seen(self, now_ns: int) -> int:
        """The same, by somebody who only reads."""
        words = self._words
        slot = now_ns // SLOT_NS
        for _ in range(READS):
            total = words[_TOTAL]
            current = words[_CURRENT]
            if slot <= current:
                return total
            if slot - current >= SLOTS:
                return 0
            passed = sum(words[_RING + number % SLOTS] for number in range(current + 1, slot + 1))
            if words[_CURRENT] == current:  # else slots were given to another second while they were looked at
                return total - passed
        return total

    @property
    def newest(self) -> int:
        """Number of the last slot that something was added to."""
        return self._words[_NEWEST]

    def amount_of(self, slot: int) -> int:
        """What was counted in one slot, as far as it is remembered."""
        current = self._words[_CURRENT]
        return self._words[_RING + slot % SLOTS] if current - SLOTS < slot <= current else 0

    def below_in_ns(self, now_ns: int, limit: int, others: Sequence[SlidingWindow] = ()) -> int:
        """How long until less than `limit` is counted, by this window and others, if nothing is added; 0: it is so."""
        left = self.total(now_ns) + sum(other.seen(now_ns) for other in others)
        newest = now_ns // SLOT_NS
        for slot in range(newest - SLOTS + 1, newest + 1):
            if left < limit:
                break
            amount = self.amount_of(slot) + sum(other.amount_of(slot) for other in others)
            left -= amount
            if amount and left < limit:
                return (slot + SLOTS) * SLOT_NS - now_ns
        return 0

    def empty_in_ns(self, now_ns: int, others: Sequence[SlidingWindow] = ()) -> int:
        """How long until nothing is counted, by this window and others, if nothing is added."""
        newest = self._words[_NEWEST] if self.total(now_ns) else 0
        for other in others:
            if other.seen(now_ns):
                newest = max(newest, other.newest)
        return (newest + SLOTS) * SLOT_NS - now_ns if newest else 0

    def _advance(self, now_ns: int) -> None:
        """Empties the slots that have grown older than a minute."""
        words = self._words
        slot = now_ns // SLOT_NS
        current = words[_CURRENT]
        if slot <= current:
            return
        if slot - current >= SLOTS:
            words[_RING:WORDS] = _EMPTY_RING
            words[_TOTAL] = 0
        else:
            for passed in range(_RING + (current + 1) % SLOTS, _RING + (current + 1) % SLOTS + slot - current):
                place = passed if passed < WORDS else passed - SLOTS
                amount = words[place]
                if amount:
                    words[place] = 0
                    words[_TOTAL] -= amount
        words[_CURRENT] = slot


def seconds_to_empty(newest: int, now_ns: int) -> float:
    """How long until nothing is counted, if nothing is added; `newest`: the last slot that counts something, or 0."""
    return ((newest + SLOTS) * SLOT_NS - now_ns) / 1e9 if newest else 0.0
