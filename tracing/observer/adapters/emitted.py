"""Spans of other makers' engines: which one is the request's, and the durations that it and those below it tell.

vLLM emits one span `llm_request` with `gen_ai.latency.*` (seconds) and nothing below it. SGLang emits a root named
after the request, with the same attributes but no time in queue (its prefill runs from dispatch to first token, the
wait included), and below it a span for each stage; those are exact, and are preferred to the attributes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from protocol.timings import Timings
from tracing import semconv
from tracing.observer.adapters.evidence import Evidence
from tracing.spans import Span
from tracing.stages import SPAN

_ATTRIBUTES = {
    "queue_ms": semconv.LATENCY_QUEUE,
    "prompt_ms": semconv.LATENCY_PREFILL,
    "predicted_ms": semconv.LATENCY_DECODE,
}
_CHILDREN = {
    semconv.SPAN_TOKENIZE: "tokenize_ms",
    semconv.SPAN_QUEUE: "queue_ms",
    "prefill_waiting": "queue_ms",
    semconv.SPAN_PREFILL: "prompt_ms",
    "prefill_forward": "prompt_ms",
    semconv.SPAN_DECODE: "predicted_ms",
    "decode_forward": "predicted_ms",
}
"""Names of stage spans: our own engine's, and SGLang's."""
MAX_DEPTH = 32
_decode_report = msgspec.json.Decoder(Timings).decode
_LATENCIES = (*_ATTRIBUTES.values(), semconv.LATENCY_TTFT, semconv.LATENCY_E2E)


def is_engine_span(span: Span) -> bool:
    """Whether this is the engine's account of a whole request."""
    return span.name == semconv.SPAN_LLM_REQUEST or any(name in span.attributes for name in _LATENCIES)


def tells_all(engine: Span) -> bool:
    """Whether its attributes alone say how long it queued and prefilled: no span below it need be waited for."""
    return all(_seconds(engine, name) is not None for name in (semconv.LATENCY_QUEUE, semconv.LATENCY_PREFILL))


def evidence_of_spans(engine: Span, others: Iterable[Span] = ()) -> Evidence | None:
    """What the request's span and the stage spans below it tell; None when they tell no stage.

    Our own engine puts its whole report there, marks included, for requests whose answer nobody was left to read.

    Of a stage that came again, after a preemption or on other ranks of a parallel engine, the first counts.
    """
    report = engine.attributes.get(semconv.TIMINGS)
    if isinstance(report, str):
        try:
            return Evidence(_decode_report(report), SPAN)
        except msgspec.DecodeError:
            pass  # not our own engine's: its other attributes may still tell something
    told: dict[str, float] = {}
    for field, name in _ATTRIBUTES.items():
        seconds = _seconds(engine, name)
        if seconds is not None:
            told[field] = seconds * 1e3
    seen: set[str] = set()
    for span in sorted(_below(engine, others), key=lambda span: span.start_ns):
        stage = _CHILDREN.get(span.name)
        if stage is not None and stage not in seen:
            seen.add(stage)
            told[stage] = (span.end_ns - span.start_ns) / 1e6
    if not told:
        return None
    return Evidence(msgspec.convert(told, Timings), SPAN, _seconds(engine, semconv.LATENCY_TTFT))


def _below(engine: Span, others: Iterable[Span]) -> list[Span]:
    spans = list(others)
    parents = {span.span_id: span.parent_id for span in spans}

    def hangs_below(span: Span) -> bool:
        parent, steps = span.parent_id, 0
        while parent is not None and parent != engine.span_id and steps <= MAX_DEPTH:
            parent, steps = parents.get(parent), steps + 1
        return parent == engine.span_id

    return [span for span in spans if hangs_below(span)]


def _seconds(span: Span, name: str) -> float | None:
    value = span.attributes.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None
