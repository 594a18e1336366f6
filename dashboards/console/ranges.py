"""Each stage of a request beside what is usual for its class: a band from P50 to P99 and a dot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dashboards.console.axis import Axis
from dashboards.console.charts import Record, in_time_order

ROOM = 1.08
"""The axis goes a little beyond the largest value on it."""
SURELY_OVER = 1.05
"""Times P99: quantiles of a sketch are exact to a few percent, and a class's slowest may be this very request."""


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
    """This request lies above P99, and not by the sketch's error."""


def figures(record: Record) -> list[Range]:
    """TTFT, TPOT and E2E beside the class's own."""
    usual = _usual(record).get("figures") or {}
    values = {name: record.get(f"{name}_ms") for name in ("ttft", "tpot", "e2e")}
    known = {name: ms for name, ms in values.items() if ms is not None}
    return _ranges(
        {
            name.upper(): (ms, {f"{key}_ms": value for key, value in (usual.get(f"{name}_ms") or {}).items()})
            for name, ms in known.items()
        }
    )


def ranges(record: Record) -> list[Range]:
    """The stages for which the baseline knows a range, as time runs."""
    usual = _usual(record).get("stages") or {}
    stages = {**(record.get("stages") or {}), **(record.get("after") or {})}
    return _ranges({name: (ms, usual.get(name) or {}) for name, ms in in_time_order(stages)})


def _usual(record: Record) -> Mapping[str, Any]:
    """The baseline that the request was compared with; empty while there is none of enough requests."""
    baseline = record.get("baseline") or {}
    return {} if baseline.get("compared_with") == "none" else baseline


def _ranges(pairs: Mapping[str, tuple[float, Mapping[str, float | None]]]) -> list[Range]:
    found = []
    for name, (ms, known) in pairs.items():
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
                is_over=ms > p99_ms * SURELY_OVER,
            )
        )
    return found
