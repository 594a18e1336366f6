"""Statistics of a list of numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

PERCENTILES = (50, 90, 95, 99)


def quantile(ordered: Sequence[float], share: float) -> float:
    """The quantile of numbers in order, interpolated between its two neighbours. `ordered` must not be empty."""
    position = share * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def spread(values: Iterable[float | None]) -> dict[str, float | int | None]:
    """count, mean (for reference only), p50, p90, p95, p99, max; None where there is no value."""
    ordered = sorted(value for value in values if value is not None)
    names = [f"p{percent}" for percent in PERCENTILES]
    if not ordered:
        return {"count": 0, "mean": None, **dict.fromkeys(names), "max": None}
    quantiles = {f"p{percent}": rounded(quantile(ordered, percent / 100)) for percent in PERCENTILES}
    return {
        "count": len(ordered),
        "mean": rounded(math.fsum(ordered) / len(ordered)),
        **quantiles,
        "max": rounded(ordered[-1]),
    }


def rounded(value: float) -> float:
    """Six significant digits: more than any clock here is worth."""
    return float(f"{value:.6g}")
