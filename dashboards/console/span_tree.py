"""The spans of one trace as a tree: parents before children, each with its place on one axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dashboards.console.axis import Axis, Bar
from dashboards.console.charts import Record
from tracing import semconv
from tracing.spans import GATEWAY_RESOURCE

MAX_SHOWN = 200
MAX_DEPTH = 6


@dataclass(frozen=True)
class ShownSpan:
    """One line of the tree."""

    bar: Bar
    depth: int
    service: str
    """Who made it; empty where that is the one before."""
    is_derived: bool
    has_failed: bool
    attributes: Mapping[str, Any]


@dataclass(frozen=True)
class SpanTree:
    """What is shown of a trace; `count` spans are there."""

    spans: tuple[ShownSpan, ...]
    ticks: tuple[tuple[float, str], ...]
    count: int
    emitted: int
    derived: int


def span_tree(record: Record) -> SpanTree:
    """The tree of the record's spans; the axis is ms since the request's own span began."""
    spans = record.get("spans") or []
    ordered = _ordered(spans)[:MAX_SHOWN]
    origin_ns = spans[0]["start_ns"] if spans else 0
    placed = [((one["start_ns"] - origin_ns) / 1e6, (one["end_ns"] - one["start_ns"]) / 1e6) for one, _ in ordered]
    axis = Axis(
        min((start for start, _ in placed), default=0.0), max((start + length for start, length in placed), default=0.0)
    )
    services = [None, *(_service(span) for span, _ in ordered)][: len(ordered)]
    shown = tuple(
        ShownSpan(
            bar=axis.bar(span["name"], place[1], _group_of(span), [place], None),
            depth=min(depth, MAX_DEPTH),
            service="" if _service(span) == before else _service(span),
            is_derived=_is_derived(span),
            has_failed=span["status"] == "error",
            attributes=span["attributes"],
        )
        for (span, depth), place, before in zip(ordered, placed, services, strict=True)
    )
    derived = sum(map(_is_derived, spans))
    return SpanTree(shown, axis.ticks(), len(spans), len(spans) - derived, derived)


def _ordered(spans: list[dict[str, Any]]) -> list[tuple[dict[str, Any], int]]:
    """(span, depth), depth first, siblings by their start. What hangs in a circle comes last."""
    known = {span["span_id"] for span in spans}
    children: dict[str | None, list[dict[str, Any]]] = {}
    for span in sorted(spans, key=lambda span: (span["start_ns"], -span["end_ns"])):
        children.setdefault(span["parent_id"] if span["parent_id"] in known else None, []).append(span)
    found: list[tuple[dict[str, Any], int]] = []
    waiting = [(span, 0) for span in reversed(children.get(None, []))]
    while waiting:
        span, depth = waiting.pop()
        found.append((span, depth))
        waiting += [(child, depth + 1) for child in reversed(children.pop(span["span_id"], []))]
    seen = {id(span) for span, _ in found}
    return found + [(span, 0) for span in spans if id(span) not in seen]


def _service(span: Mapping[str, Any]) -> str:
    return str(span["resource"].get("service.name", ""))


def _is_derived(span: Mapping[str, Any]) -> bool:
    return bool(span["attributes"].get(semconv.DERIVED))


def _group_of(span: Mapping[str, Any]) -> str:
    own = _service(span) == GATEWAY_RESOURCE["service.name"]
    return "gateway" if own and not _is_derived(span) else "engine"
