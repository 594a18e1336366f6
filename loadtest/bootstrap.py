"""Intervals by resampling: how far off a figure may be, of requests that are not independent of one another."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from loadtest.figures import quantile

RESAMPLES = 2000
CONFIDENCE = 0.99
LOWER_SHARES = (0.5, 0.75, 0.9, 0.95)
FEW_BLOCKS = 4
"""Fewer blocks of time say nothing of how alike the requests of a block are: each counts as one request then."""


def interval(draw: Callable[[], float]) -> tuple[float, float]:
    """What CONFIDENCE of many draws lie in."""
    drawn = sorted(draw() for _ in range(RESAMPLES))
    tail = (1 - CONFIDENCE) / 2
    return quantile(drawn, tail), quantile(drawn, 1 - tail)


def resampled(ordered: Sequence[float], share: float, rng: random.Random, independent: float | None = None) -> float:
    """The quantile of one bootstrap resample, without making it.

    Of n numbers drawn uniformly, the k-th smallest is Beta(k, n + 1 - k) distributed; drawn with replacement from a
    sample, it is the sample's own quantile there. `independent`: n, where the sample is worth fewer than it has.
    """
    count = len(ordered)
    worth = count if independent is None else independent
    rank = share * (worth - 1) + 1
    return ordered[min(count - 1, int(rng.betavariate(rank, worth + 1 - rank) * count))]


def worth(timed: Sequence[tuple[int, float]], ordered: Sequence[float], share: float, block_us: int) -> float:
    """How many independent requests a sample is worth for its quantile at `share`.

    A moment in which everything was slow lies above lower quantiles as a whole, but is cut in two by a high one: the
    least of what the sample is worth up to there counts.
    """
    shares = {share, *(lower for lower in LOWER_SHARES if lower < share)}
    return min(independent(timed, quantile(ordered, one), block_us) for one in shares)


def independent(timed: Sequence[tuple[int, float]], at: float, block_us: int) -> float:
    """How many independent requests a sample of (when, value) is worth, for a quantile that lies at the value `at`.

    Requests that a server works on together share their luck. They are put into blocks of time; as much as the shares
    below `at` differ between blocks beyond chance, so much is the sample worth less (Kish's design effect).
    """
    blocks: dict[int, list[int]] = {}
    for when, value in timed:
        block = blocks.setdefault(when // max(1, block_us), [0, 0])
        block[0] += 1
        block[1] += value <= at
    count = len(timed)
    if len(blocks) < FEW_BLOCKS:
        return float(min(count, len(blocks)))
    share = sum(below for _, below in blocks.values()) / count
    chance = count * share * (1 - share)
    if not chance:
        return float(count)
    spread = sum((below - share * total) ** 2 for total, below in blocks.values())
    effect = spread / chance * len(blocks) / (len(blocks) - 1)
    return max(1.0, count / max(1.0, effect))


def block_mean(bins: Sequence[float], rng: random.Random) -> float:
    """The mean of a resample in blocks of neighbours: seconds are not independent of those next to them."""
    count = len(bins)
    length = max(1, round(count ** (1 / 3)))
    total, drawn = 0.0, 0
    while drawn < count:
        start = rng.randrange(count - length + 1)
        block = bins[start : start + min(length, count - drawn)]
        total += sum(block)
        drawn += len(block)
    return total / count
