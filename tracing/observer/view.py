"""What people and the command line see of a request: JSON of one row, and its line in the access log."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec

from tracing.ledger import Attempt, Ledger
from tracing.observer.adapters import centred, stand_ins
from tracing.observer.rows import Row, milliseconds
from tracing.spans import Span, gateway_spans

_MARKS = (
    "ingress",
    "authenticated",
    "body_read",
    "routed",
    "admitted",
    "first_event",
    "first_token",
    "first_reasoning",
    "first_visible",
    "first_token_written",
    "last_token",
    "upstream_end",
    "finish",
    "client_gone",
)
_ATTEMPT_MARKS = ("connect_start", "connected", "request_sent", "upstream_headers", "upstream_first_byte", "end")
_PLACEMENTS = {"exact": "exact", "durations": "centred"}


def request_view(row: Row, *, complete: bool) -> dict[str, Any]:
    """One request, whole. Times in ms; marks in ms since ingress. `complete`: no engine span is waited for any more."""
    ledger, timeline = row.ledger, row.timeline
    usage, timings = ledger.usage, ledger.timings
    return {
        "request_id": ledger.request_id,
        "client_request_id": ledger.client_request_id,
        "trace_id": ledger.trace_id,
        "model": ledger.model,
        "upstream": ledger.upstream,
        "surface": ledger.surface,
        "stream": ledger.stream,
        "outcome": ledger.outcome.value,
        "status": ledger.status,
        "error_code": ledger.error_code,
        "finish_reason": ledger.finish_reason,
        "key_alias": ledger.key_alias,
        "team": ledger.team,
        "started": started(ledger),
        "ttft_ms": milliseconds(timeline.ttft),
        "tpot_ms": milliseconds(timeline.tpot),
        "tpot_count": timeline.tpot_count,
        "e2e_ms": milliseconds(timeline.e2e),
        "engine_ttft_ms": milliseconds(timeline.engine_ttft),
        "overhead_ms": milliseconds(timeline.overhead),
        "stages": _in_ms(timeline.stages),
        "sources": timeline.sources,
        "total_ms": milliseconds(timeline.total),
        "unaccounted_ms": milliseconds(timeline.unaccounted),
        "after": _in_ms(timeline.after),
        "dominant_stage": row.dominant,
        "anomalies": list(timeline.anomalies),
        "placement": _PLACEMENTS.get(timeline.placement or ""),
        "engine": msgspec.to_builtins(timings.engine) if timings and timings.engine else None,
        "simulated": bool(timings and timings.simulated),
        "tokens": {
            "input": usage.input_tokens,
            "cached": usage.cached_tokens,
            "output": usage.output_tokens,
            "reasoning": usage.reasoning_tokens,
        },
        "tokens_source": usage.source,
        "attempts": [_attempt_view(ledger, attempt) for attempt in ledger.attempts],
        "marks": _marks(ledger, row.timeline.placement == "exact"),
        "client": _client_view(ledger),
        "loop_lag_ms": round(ledger.loop_lag_ns / 1e6, 6),
        "trace_complete": complete,
        "kept": row.kept,
    }


def slow_view(row: Row) -> dict[str, Any]:
    """One line of the slowest requests."""
    ledger, timeline = row.ledger, row.timeline
    return {
        "request_id": ledger.request_id,
        "trace_id": ledger.trace_id,
        "model": ledger.model,
        "upstream": ledger.upstream,
        "surface": ledger.surface,
        "stream": ledger.stream,
        "outcome": ledger.outcome.value,
        "status": ledger.status,
        "started": started(ledger),
        "ttft_ms": milliseconds(timeline.ttft),
        "e2e_ms": milliseconds(timeline.e2e),
        "tpot_ms": milliseconds(timeline.tpot),
        "stages": _in_ms(timeline.stages),
        "total_ms": milliseconds(timeline.total),
        "unaccounted_ms": milliseconds(timeline.unaccounted),
        "dominant_stage": row.dominant,
    }


def access_line(row: Row) -> dict[str, Any]:
    """The request's line in the access log."""
    ledger, timeline = row.ledger, row.timeline
    return {
        "started": started(ledger),
        "request_id": ledger.request_id,
        "client_request_id": ledger.client_request_id,
        "trace_id": ledger.trace_id,
        "key_alias": ledger.key_alias,
        "team": ledger.team,
        "method": ledger.method,
        "path": ledger.path,
        "model": ledger.model,
        "upstream": ledger.upstream,
        "outcome": ledger.outcome.value,
        "status": ledger.status,
        "error_code": ledger.error_code,
        "ttft_ms": milliseconds(timeline.ttft),
        "tpot_ms": milliseconds(timeline.tpot),
        "e2e_ms": milliseconds(timeline.e2e),
        "stages": _in_ms(timeline.stages),
        "unaccounted_ms": milliseconds(timeline.unaccounted),
    }


def trace_of(row: Row, engine_spans: list[Span]) -> list[Span]:
    """Every span of one request: the gateway's, the engine's, and stand-ins for what the engine did not send.

    `engine_spans` are all that are known of the trace; those of other requests in the same trace are left out.
    """
    own = gateway_spans(row.ledger, row.timeline)
    engine = _below({attempt.span_id for attempt in row.ledger.attempts}, engine_spans)
    return own + centred(row, [*engine, *stand_ins(row, engine)])


def span_view(span: Span) -> dict[str, Any]:
    """A span as JSON, with every field."""
    view: dict[str, Any] = msgspec.to_builtins({name: getattr(span, name) for name in span.__struct_fields__})
    return view


def started(ledger: Ledger) -> str:
    """Wall time at ingress, ISO 8601 in UTC, to the microsecond."""
    return datetime.fromtimestamp(ledger.wall_ns / 1e9, UTC).isoformat(timespec="microseconds")


def _below(attempts: set[str], spans: list[Span]) -> list[Span]:
    parents = {span.span_id: span.parent_id for span in spans}

    def hangs_below(span: Span) -> bool:
        parent, steps = span.parent_id, 0
        while parent is not None and parent not in attempts and steps < len(parents):
            parent, steps = parents.get(parent), steps + 1
        return parent in attempts

    return [span for span in spans if hangs_below(span)]


def _in_ms(stages: dict[str, float]) -> dict[str, float]:
    return {name: round(seconds * 1e3, 6) for name, seconds in stages.items()}


def _since(ledger: Ledger, mark: int) -> float:
    return round((mark - ledger.ingress) / 1e6, 6)


def _marks(ledger: Ledger, with_engine: bool) -> dict[str, float]:
    marks = {name: _since(ledger, mark) for name in _MARKS if (mark := getattr(ledger, name))}
    if with_engine and ledger.timings is not None and ledger.timings.marks is not None:
        for name in ledger.timings.marks.__struct_fields__:
            if mark := getattr(ledger.timings.marks, name):
                marks[f"engine_{name}"] = _since(ledger, mark)
    return marks


def _client_view(ledger: Ledger) -> dict[str, Any]:
    """The client's connection; None: not known. `network_ms` is on two clocks, and in no sum."""
    return {
        "network_ms": None if ledger.client_network_ns is None else round(ledger.client_network_ns / 1e6, 6),
        "rtt_ms": round(ledger.client_rtt_ns / 1e6, 6) if ledger.client_rtt_ns else None,
        "backpressure_ms": round(ledger.backpressure_ns / 1e6, 6),
        "unsent_bytes": ledger.unsent_bytes,
    }


def _attempt_view(ledger: Ledger, attempt: Attempt) -> dict[str, Any]:
    return {
        "number": attempt.number,
        "upstream": attempt.upstream,
        "model": attempt.model,
        "span_id": attempt.span_id,
        "status": attempt.status,
        "error": attempt.error,
        "reused": attempt.reused,
        "upstream_request_id": attempt.upstream_request_id,
        "server_timing": attempt.server_timing,
        "marks": {name: _since(ledger, mark) for name in _ATTEMPT_MARKS if (mark := getattr(attempt, name))},
    }
