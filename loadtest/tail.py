"""What slow requests have in common: the length of their prompts, how many were in flight, or a time window."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from typing import Any

from loadtest.figures import quantile, rounded
from loadtest.record import Record

FEWEST = 20
JITTER = 3.0
"""P99 over P50 from which on the tail is asked about."""
STRONG = 0.5
"""Rank correlation from which on TTFT is said to go with something."""
SLICES = 20
CROWDED = 0.6
"""Share of the slow requests in two slices of the time from which on they are said to share a window."""


def tail(good: Sequence[Record], everybody: Sequence[Record], from_ns: int, to_ns: int) -> dict[str, Any] | None:
    """What the slowest twentieth by TTFT goes with; None where there is too little to say or no tail to speak of."""
    timed = [(ttft, record) for record in good if (ttft := record.ttft_ms) is not None]
    if len(timed) < FEWEST:
        return None
    ordered = sorted(ttft for ttft, _ in timed)
    p50, p95, p99 = (quantile(ordered, share) for share in (0.5, 0.95, 0.99))
    if not p50 or p99 < JITTER * p50:
        return None
    times = [ttft for ttft, _ in timed]
    length = correlation(times, [float(record.prompt_tokens or 0) for _, record in timed])
    load = correlation(times, _in_flight([record for _, record in timed], everybody))
    share, begin_s = _window([record for ttft, record in timed if ttft >= p95], from_ns, to_ns)
    return {
        "p99_over_p50": rounded(p99 / p50),
        "with_prompt_length": rounded(length),
        "with_requests_in_flight": rounded(load),
        "share_in_one_window": rounded(share),
        "verdict": _verdict(length, load, share, begin_s, (to_ns - from_ns) / 1e9 * 2 / SLICES),
    }


def _verdict(length: float, load: float, share: float, begin_s: float, window_s: float) -> str:
    if max(length, load) >= STRONG:
        return "it goes with the prompt's length" if length >= load else "it goes with how many were in flight"
    if share >= CROWDED:
        return f"it goes with a time window: {window_s:.0f} s from second {begin_s:.0f} of what counts"
    return "it goes with neither prompt length, requests in flight nor one time window"


def correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's rank correlation, -1 to 1; 0 where one of them does not vary."""
    first, second = _ranks(a), _ranks(b)
    mean = (len(a) - 1) / 2
    both = sum((x - mean) * (y - mean) for x, y in zip(first, second, strict=True))
    spreads = [sum((x - mean) ** 2 for x in ranks) for ranks in (first, second)]
    return both / (spreads[0] * spreads[1]) ** 0.5 if min(spreads) > 0 else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    # Equal values share the middle of their places.
    places: dict[float, float] = {}
    for value, count in Counter(ordered).items():
        places[value] = bisect_left(ordered, value) + (count - 1) / 2
    return [places[value] for value in values]


def _in_flight(of: Sequence[Record], everybody: Sequence[Record]) -> list[float]:
    starts = sorted(record.scheduled_ns for record in everybody)
    ends = sorted(record.end_ns for record in everybody)
    return [float(bisect_left(starts, r.scheduled_ns) - bisect_left(ends, r.scheduled_ns)) for r in of]


def _window(slow: Sequence[Record], from_ns: int, to_ns: int) -> tuple[float, float]:
    """The largest share of the slow that two neighbouring slices of the time hold, and when those begin, in s."""
    width = max(1, (to_ns - from_ns) // SLICES)
    slices = Counter(min(SLICES - 1, (record.scheduled_ns - from_ns) // width) for record in slow)
    best = max(range(SLICES - 1), key=lambda n: slices[n] + slices[n + 1])
    return (slices[best] + slices[best + 1]) / len(slow), best * width / 1e9
