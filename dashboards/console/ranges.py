"""Each stage of a request beside what is usual for its class: a band from P50 to P99 and a dot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dashboards.console.axis import Axis
from dashboards.console.charts import Record, in_time_order

ROOM = 1.08
"""The axis goes a little beyond the largest value on it."""


@dataclass(frozen=True)
class Range:
    """One stage; places are percent of an axis of its own, from 0."""

    name: str
    ms: float
    p50_ms: float
    p95_ms: float | None
    p99_ms: float
    place: float
    band: tuple[float, float]
    """(start, length) of P50 to P99."""
    p95_place: float | None
    is_over: bool
    """This request lies above P99."""


def ranges(record: Record) -> list[Range]:
    """The stages for which the baseline knows a range, as time runs."""
    usual: Mapping[str, Mapping[str, Any]] = (record.get("baseline") or {}).get("stages") or {}
    stages = {**(record.get("stages") or {}), **(record.get("after") or {})}
    found = []
    for name, ms in in_time_order(stages):
        known = usual.get(name) or {}
        p50_ms, p95_ms, p99_ms = (known.get(key) for key in ("p50_ms", "p95_ms", "p99_ms"))
        if p50_ms is None or p99_ms is None:
            continue
        axis = Axis(0.0, max(ms, p99_ms) * ROOM)
        start = axis.place(p50_ms)
        found.append(
            Range(
                name=name,
                ms=ms,
                p50_ms=p50_ms,
                p95_ms=p95_ms,
                p99_ms=p99_ms,
                place=axis.place(ms),
                band=(start, round(axis.place(p99_ms) - start, 3)),
                p95_place=None if p95_ms is None else axis.place(p95_ms),
                is_over=ms > p99_ms,
            )
        )
    return found
