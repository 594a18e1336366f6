"""Stand-ins: derived spans in place of those that an engine did not emit, so that every trace shows the same stages.

An engine that emitted nothing is shown from its timings or header (tracing.derived). One that emitted a childless
`llm_request` with durations gets children inside that span's own start and end: they share its clock, whichever it is.
"""

from __future__ import annotations

from collections.abc import Iterable

from protocol.timings import HostIdentity
from tracing import semconv
from tracing.derived import derived_engine_spans
from tracing.observer.adapters.emitted import evidence_of_spans, is_engine_span
from tracing.observer.adapters.evidence import Evidence
from tracing.observer.adapters.placing import is_on, placement_of
from tracing.observer.rows import Row
from tracing.spans import Attributes, Span, derived_span_id, known


def stand_ins(row: Row, emitted: Iterable[Span]) -> list[Span]:
    """Spans to be shown beside `emitted`, which are all that came of the request. Making them twice makes the same."""
    spans = list(emitted)
    if not row.ledger.attempts:
        return []
    if not spans:
        return derived_engine_spans(row.ledger, row.ledger.attempts[-1], row.host)
    parents = {span.parent_id for span in spans}
    found: list[Span] = []
    for span in spans:
        if is_engine_span(span) and span.span_id not in parents:
            evidence = evidence_of_spans(span)
            if evidence is not None:
                found += _children(span, evidence, row.host)
    return found


def _children(engine: Span, evidence: Evidence, host: HostIdentity) -> list[Span]:
    """Queue, prefill and decode in a row. The first token's time, where it is told, ends prefill; else queue begins
    where the request does. The row is moved forward when decode would reach beyond the end."""
    timings = evidence.timings
    row = [
        (name, round(ms * 1e6))
        for name, ms in (
            (semconv.SPAN_QUEUE, timings.queue_ms),
            (semconv.SPAN_PREFILL, timings.prompt_ms),
            (semconv.SPAN_DECODE, timings.predicted_ms),
        )
        if ms is not None
    ]
    before_decode = sum(length for name, length in row if name != semconv.SPAN_DECODE)
    at = engine.start_ns
    if evidence.engine_ttft is not None:
        at += round(evidence.engine_ttft * 1e9) - before_decode
    at = max(engine.start_ns, min(at, engine.end_ns - sum(length for _, length in row)))
    marks: Attributes = {semconv.DERIVED: True, semconv.PLACEMENT: placement_of(is_on(engine, host))}
    found = []
    for name, length in row:
        found.append(_child(engine, name, at, at + length, _counts(engine, name) | marks))
        at += length
    return found


def _child(engine: Span, name: str, start_ns: int, end_ns: int, attributes: Attributes) -> Span:
    return Span(
        trace_id=engine.trace_id,
        span_id=derived_span_id(engine.trace_id, engine.span_id, name),
        parent_id=engine.span_id,
        name=name,
        start_ns=start_ns,
        end_ns=end_ns,
        attributes=attributes,
        resource=engine.resource,
        scope=engine.scope,
        scope_version=engine.scope_version,
        trace_state=engine.trace_state,
    )


def _counts(engine: Span, name: str) -> Attributes:
    said = engine.attributes.get
    if name == semconv.SPAN_PREFILL:
        return known(
            {
                semconv.PROMPT_TOKENS: said(semconv.PROMPT_TOKENS_OF_ENGINES, said(semconv.GEN_AI_INPUT_TOKENS)),
                semconv.CACHED_TOKENS: said(semconv.CACHED_TOKENS_OF_ENGINES),
            }
        )
    if name == semconv.SPAN_DECODE:
        outputs = said(semconv.COMPLETION_TOKENS_OF_ENGINES, said(semconv.GEN_AI_OUTPUT_TOKENS))
        return known({semconv.OUTPUT_TOKENS: outputs})
    return {}
