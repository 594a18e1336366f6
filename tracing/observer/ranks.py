"""Order statistics of small lists: exact quantiles, and how far a group stands out of another by rank."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from math import ceil, sqrt


def quantile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least this share (0 to 1) of all values doesn't exceed. `ordered` is not empty."""
    return ordered[max(0, ceil(share * len(ordered)) - 1)]


def rank_correlation(group: Sequence[float], others: Sequence[float]) -> float:
    """Between being in the group and having a larger value: the rank-biserial correlation, -1 to 1.

    1: every value of the group is above every other; 0: they are mixed evenly. Neither list is empty.
    """
    ordered = sorted(others)
    above = sum(bisect_left(ordered, value) + bisect_right(ordered, value) for value in group)
    return above / (len(group) * len(ordered)) - 1


def chance_correlation(group: int, others: int) -> float:
    """What |rank_correlation| of groups of these sizes exceeds by chance once in about 400 times (three sigmas)."""
    return 6 * sqrt((group + others + 1) / (12 * group * others))
