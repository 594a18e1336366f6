"""A quantile sketch: counts in buckets of equal ratio, so that a quantile is known to RELATIVE_ERROR of its value.

After DDSketch (Masson, Rim, Lee: "DDSketch: a fast and fully-mergeable quantile sketch with relative-error
guarantees", VLDB 2019), without its collapsing: values are clamped to [SMALLEST, LARGEST] instead, which bounds the
number of buckets. Merging two sketches loses nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil, log

import msgspec

RELATIVE_ERROR = 0.02
SMALLEST = 1e-5
"""Values up to this, negative ones included, count as 0: 10 µs where the unit is seconds."""
LARGEST = 1e7

_GAMMA = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
_PER_LOG = 1 / log(_GAMMA)


class Sketch(msgspec.Struct, array_like=True):
    """Bucket i counts values in (gamma^(i-1), gamma^i]."""

    zeros: int = 0
    counts: dict[int, int] = {}

    @property
    def total(self) -> int:
        """How many values were added."""
        return self.zeros + sum(self.counts.values())

    def add(self, value: float) -> None:
        """One value of any unit."""
        if value <= SMALLEST:
            self.zeros += 1
            return
        bucket = ceil(log(min(value, LARGEST)) * _PER_LOG)
        counts = self.counts
        counts[bucket] = counts.get(bucket, 0) + 1

    def merge(self, other: Sketch) -> None:
        """Adds everything that was added to the other."""
        self.zeros += other.zeros
        for bucket, count in other.counts.items():
            self.counts[bucket] = self.counts.get(bucket, 0) + count

    def quantiles(self, shares: Iterable[float]) -> list[float]:
        """The values below which these shares (0 to 1, ascending) of all values lie. Raises ValueError when empty."""
        total = self.total
        if not total:
            raise ValueError("a sketch without values has no quantiles")
        buckets = iter([(0, self.zeros), *sorted(self.counts.items())] if self.zeros else sorted(self.counts.items()))
        bucket, reached = next(buckets)
        is_zero = bool(self.zeros)
        found = []
        for share in shares:
            rank = share * (total - 1)
            while reached <= rank:
                bucket, count = next(buckets)
                reached, is_zero = reached + count, False
            found.append(0.0 if is_zero else 2 * _GAMMA**bucket / (_GAMMA + 1))
        return found

    def share_below(self, value: float) -> float:
        """The share of values that are smaller, half of those in its own bucket included; 0 to 1, nan when empty."""
        total = self.total
        if not total:
            return float("nan")
        if value <= SMALLEST:
            return self.zeros / 2 / total
        bucket = ceil(log(min(value, LARGEST)) * _PER_LOG)
        below = sum(count for other, count in self.counts.items() if other < bucket)
        return (self.zeros + below + self.counts.get(bucket, 0) / 2) / total
