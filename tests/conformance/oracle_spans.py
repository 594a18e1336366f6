"""The trace of a request: whose child each span is, none twice, what is derived marked so."""

from __future__ import annotations

from conformance_rig import MODEL
from expectation import Expect, Played

from tracing.spans import Span


def check_spans(played: Played, expect: Expect) -> None:
    """One trace: the gateway's own spans, one for each attempt, the engine's below the one it served; no doubles."""
    ledger = played.ledger
    spans = played.bench.trace_of(ledger)
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans), [span.name for span in spans]
    assert {span.trace_id for span in spans} == {ledger.trace_id}
    roots = [span for span in spans if span.parent_id not in by_id]
    assert [span.span_id for span in roots] == [ledger.span_id]
    children = [span.name for span in spans if span.parent_id == ledger.span_id]
    own = ["auth", "receive", "route", *(["queue"] if ledger.admitted else [])]
    operation = "chat" if played.surface == "chat" else "text_completion"
    attempts = [f"{operation} {MODEL}"] * len(expect.attempts)
    relay = ["relay"] if ledger.attempts and played.last.upstream_first_byte else []
    assert sorted(children) == sorted([*own, *attempts, *relay])
    for attempt in ledger.attempts:
        span = by_id[attempt.span_id]
        assert (span.start_ns - ledger.wall_ns, span.end_ns - ledger.wall_ns) == (
            attempt.connect_start - ledger.ingress,
            attempt.end - ledger.ingress,
        )
    _check_engine_spans(played, expect, spans)


def _check_engine_spans(played: Played, expect: Expect, spans: list[Span]) -> None:
    requests = [span for span in spans if span.name == "llm_request"]
    if expect.told_by == "nothing" and played.script.spans == "none":
        assert not requests
        return
    (request,) = requests
    assert request.parent_id == played.last.span_id
    children = {span.name: span for span in spans if span.parent_id == request.span_id}
    emitted = played.script.spans == "children"
    names = {"queue", "prefill", "decode"}
    if not emitted:
        names |= {"tokenize"} if expect.told_by in ("here", "elsewhere") else set()
        names -= {"queue"} if expect.told_by == "llama.cpp" else set()
        names -= {"decode"} if expect.told_by == "header" else set()
    assert set(children) == names
    assert {bool(span.attributes.get("tokenline.derived")) for span in children.values()} == {not emitted}
    witness = played.witness
    if expect.told_by == "here" or emitted:
        placed = children["prefill"]
        wall = played.ledger.wall_ns - played.ledger.ingress
        # An emitted span is placed by the engine's own wall clock, a derived one by the marks of one clock.
        tolerance_ns = 50_000_000 if emitted else 0
        assert abs(placed.start_ns - wall - witness.scheduled_ns) <= tolerance_ns
        assert placed.end_ns - placed.start_ns == witness.prefill_end_ns - witness.scheduled_ns
