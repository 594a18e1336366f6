"""Placing: where an engine's spans lie beside the gateway's, when their clocks are not one."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from protocol.timings import HostIdentity
from tracing import semconv
from tracing.observer.adapters.emitted import is_engine_span
from tracing.observer.rows import Row
from tracing.spans import Calendar, Span


def is_on(span: Span, host: HostIdentity) -> bool:
    """Whether the span's resource says that it was made on this boot of this host, so that its clock is ours."""
    resource = span.resource
    return resource.get("host.id") == host.host_id and resource.get(semconv.BOOT_ID) == host.boot_id


def placement_of(exact: bool) -> str:
    """`tokenline.placement` of spans beside the gateway's."""
    return "exact" if exact else "centred"


def centred(row: Row, emitted: Iterable[Span]) -> list[Span]:
    """For showing: every tree of engine spans from another clock is moved so that it lies in the middle of its attempt.

    What is stored and exported keeps the times that it came with; a moved span says `tokenline.placement = centred`.
    """
    spans = list(emitted)
    by_id = {span.span_id: span for span in spans}
    calendar = Calendar(row.ledger)
    ends = {a.span_id: (a.request_sent, a.end or row.ledger.finish) for a in row.ledger.attempts if a.request_sent}
    shifts: dict[str, int] = {}
    for span in spans:
        is_emitted = is_engine_span(span) and semconv.DERIVED not in span.attributes
        if is_emitted and span.parent_id in ends and not is_on(span, row.host):
            sent, end = ends[span.parent_id]
            shifts[span.span_id] = (calendar.wall(sent) + calendar.wall(end) - span.start_ns - span.end_ns) // 2
    return [_moved(span, shift) if (shift := _shift_of(span, by_id, shifts)) is not None else span for span in spans]


def _shift_of(span: Span, by_id: dict[str, Span], shifts: dict[str, int]) -> int | None:
    at: Span | None = span
    for _ in range(len(by_id)):
        if at is None:
            return None
        if at.span_id in shifts:
            return shifts[at.span_id]
        at = by_id.get(at.parent_id or "")
    return None


def _moved(span: Span, shift_ns: int) -> Span:
    return msgspec.structs.replace(
        span,
        start_ns=span.start_ns + shift_ns,
        end_ns=span.end_ns + shift_ns,
        events=[msgspec.structs.replace(event, time_ns=event.time_ns + shift_ns) for event in span.events],
        attributes=span.attributes | {semconv.PLACEMENT: placement_of(False)},
    )
