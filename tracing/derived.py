"""Derived spans: the engine's part of a trace, made from what it reported in band when it emitted no span.

They are marked `tokenline.derived`. `tokenline.placement` says how they were put on the calendar: `exact` when the
engine's marks are on our own clock, else `centred` inside the attempt's wait, since only durations are known then.
"""

from __future__ import annotations

from protocol.timings import EngineMarks, HostIdentity, Timings
from tracing import semconv
from tracing.ledger import Attempt, Ledger
from tracing.spans import (
    GATEWAY_RESOURCE,
    GATEWAY_SCOPE,
    Attributes,
    Calendar,
    Span,
    SpanKind,
    derived_span_id,
    known,
)

Placed = tuple[str, int, int]
"""(span name, start, end), ns of the gateway's monotonic clock."""


def derived_engine_spans(ledger: Ledger, attempt: Attempt, host: HostIdentity) -> list[Span]:
    """`llm_request` below the attempt's span and its children; empty when the engine reported nothing."""
    timings = ledger.timings
    if timings is None or not attempt.request_sent:
        return []
    if timings.marks is not None and timings.marks.received and timings.host == host:
        placement, placed = "exact", _placed_by_marks(timings.marks)
    else:
        placement, placed = "centred", _placed_by_durations(ledger, attempt, timings)
    if not placed:
        return []

    calendar = Calendar(ledger)
    request_id = derived_span_id(ledger.trace_id, attempt.span_id, semconv.SPAN_LLM_REQUEST)
    marks: Attributes = {semconv.DERIVED: True, semconv.PLACEMENT: placement}

    def span(name: str, span_id: str, parent_id: str, start: int, end: int, attributes: Attributes) -> Span:
        return Span(
            trace_id=ledger.trace_id,
            span_id=span_id,
            parent_id=parent_id,
            name=name,
            kind=SpanKind.SERVER if name == semconv.SPAN_LLM_REQUEST else SpanKind.INTERNAL,
            start_ns=calendar.wall(start),
            end_ns=calendar.wall(end),
            attributes=attributes | marks,
            resource=GATEWAY_RESOURCE,
            scope=GATEWAY_SCOPE,
            trace_state=ledger.tracestate or "",
        )

    start, end = placed[0][1], max(stop for _, _, stop in placed)
    request = span(
        semconv.SPAN_LLM_REQUEST, request_id, attempt.span_id, start, end, _request_attributes(ledger, attempt, timings)
    )
    children = [
        span(
            name,
            derived_span_id(ledger.trace_id, attempt.span_id, name),
            request_id,
            begin,
            stop,
            _attributes_of(name, timings),
        )
        for name, begin, stop in placed
    ]
    return [request, *children]


def _placed_by_marks(marks: EngineMarks) -> list[Placed]:
    pairs = (
        (semconv.SPAN_TOKENIZE, marks.received, marks.queued),
        (semconv.SPAN_QUEUE, marks.queued, marks.scheduled),
        (semconv.SPAN_PREFILL, marks.scheduled, marks.prefill_end),
        (semconv.SPAN_DECODE, marks.prefill_end, marks.last_token),
    )
    return [(name, start, end) for name, start, end in pairs if start and end]


def _placed_by_durations(ledger: Ledger, attempt: Attempt, timings: Timings) -> list[Placed]:
    """Durations in a row; what comes before the first token is centred between request sent and first token read."""
    first_token = ledger.first_token if attempt is ledger.attempts[-1] else 0
    before = [
        (semconv.SPAN_TOKENIZE, timings.tokenize_ms),
        (semconv.SPAN_QUEUE, timings.queue_ms),
        (semconv.SPAN_PREFILL, timings.prompt_ms),
    ]
    row = [*before, (semconv.SPAN_DECODE, timings.predicted_ms)]
    centred = before if first_token else row
    wait_end = first_token or attempt.end or ledger.finish
    wait = wait_end - attempt.request_sent
    at = attempt.request_sent + (wait - sum(round(ms * 1e6) for _, ms in centred if ms is not None)) // 2
    placed: list[Placed] = []
    for name, ms in row:
        if ms is not None:
            placed.append((name, at, at + round(ms * 1e6)))
            at = placed[-1][2]
    return placed


def _request_attributes(ledger: Ledger, attempt: Attempt, timings: Timings) -> Attributes:
    def seconds(ms: float | None) -> float | None:
        return None if ms is None else ms / 1e3

    return known(
        {
            semconv.GEN_AI_REQUEST_MODEL: attempt.model,
            semconv.GEN_AI_REQUEST_ID: attempt.upstream_request_id,
            semconv.GEN_AI_INPUT_TOKENS: ledger.usage.input_tokens,
            semconv.GEN_AI_OUTPUT_TOKENS: ledger.usage.output_tokens,
            semconv.LATENCY_QUEUE: seconds(timings.queue_ms),
            semconv.LATENCY_PREFILL: seconds(timings.prompt_ms),
            semconv.LATENCY_DECODE: seconds(timings.predicted_ms),
            semconv.SIMULATED: timings.simulated,
        }
    )


def _attributes_of(name: str, timings: Timings) -> Attributes:
    """What the engine said of one of its stages."""
    if name == semconv.SPAN_QUEUE and timings.engine is not None:
        return {
            semconv.ENGINE_RUNNING: timings.engine.running,
            semconv.ENGINE_WAITING: timings.engine.waiting,
            semconv.ENGINE_KV_USAGE: timings.engine.kv_usage,
            semconv.ENGINE_BATCH: timings.engine.batch,
        }
    if name == semconv.SPAN_PREFILL:
        return known(
            {
                semconv.PROMPT_TOKENS: timings.prompt_n,
                semconv.CACHED_TOKENS: timings.cache_n,
                semconv.PREFILL_CHUNKS: timings.prefill_chunks,
            }
        )
    if name == semconv.SPAN_DECODE:
        return known(
            {
                semconv.OUTPUT_TOKENS: timings.predicted_n,
                semconv.DECODE_STEPS: timings.steps,
                semconv.MEAN_BATCH: timings.mean_batch,
                semconv.TOKEN_GAP: None if timings.token_gap_ms is None else timings.token_gap_ms / 1e3,
            }
        )
    return {}
