"""Adapters: what engines of other makes say, read into stages and spans, and never more than they say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from ledgers import HERE, STREAM_STAGES_MS, attempt, ledger, whole

from protocol.timings import HostIdentity, Timings
from tracing import semconv
from tracing.ledger import Ledger
from tracing.observer.adapters import (
    Evidence,
    centred,
    evidence_of_header,
    evidence_of_spans,
    is_engine_span,
    retold,
    stand_ins,
)
from tracing.observer.adapters.server_timing import metrics_of
from tracing.observer.otlp import from_json
from tracing.observer.rows import Row, decode_row, encode_row
from tracing.observer.view import request_view, trace_of
from tracing.spans import Span
from tracing.stages import timeline_of

RECORDED = Path(__file__).parents[1] / "data" / "vllm-otlp-span.json"


def row_of(made: Ledger) -> Row:
    return Row(made, timeline_of(made, HERE), HERE, True)


def ms(stages: dict[str, float]) -> dict[str, float]:
    return {name: round(seconds * 1e3, 3) for name, seconds in stages.items()}


def told_ms(evidence: Evidence | None) -> dict[str, float]:
    """The durations of the evidence, by field."""
    if evidence is None:
        return {}
    return {name: round(value, 6) for name, value in msgspec.to_builtins(evidence.timings).items()}


# Server-Timing

HEADERS = [
    ("queue;dur=12.5", {"queue_ms": 12.5}),
    ("queue;dur=1, prefill;dur=2, decode;dur=3, tokenize;dur=0.5",
     {"queue_ms": 1, "prompt_ms": 2, "predicted_ms": 3, "tokenize_ms": 0.5}),
    ("engine_tokenize;dur=1,engine_queue;dur=2,engine_prefill;dur=3",
     {"tokenize_ms": 1, "queue_ms": 2, "prompt_ms": 3}),
    ("auth;dur=0.1, receive;dur=0.2, gateway_queue;dur=5, engine_queue;dur=2", {"queue_ms": 7}),
    ("Prefill ; DUR=4", {"prompt_ms": 4}),
    ('queue;desc="a, b;dur=9 \\" x";dur=4', {"queue_ms": 4}),
    ('queue;dur="4.5"', {"queue_ms": 4.5}),
    ("queue;dur=1;dur=2", {"queue_ms": 1}),
    ("queue;dur=1e1", {"queue_ms": 10}),
    ("cache;desc=hit, db;dur=53, queue;dur=2", {"queue_ms": 2}),
    (" , ,queue;dur=2,", {"queue_ms": 2}),
    ("b@d;dur=9, queue;dur=2", {"queue_ms": 2}),
    ('"quoted, queue;dur=9", queue;dur=2', {"queue_ms": 2}),
    ("queue;;dur=2", {"queue_ms": 2}),
    ("queue;dur=2 nonsense, prefill;dur=3", {"queue_ms": 2, "prompt_ms": 3}),
    ("queue", {}),
    ("queue;dur=", {}),
    ("queue;dur=abc", {}),
    ("queue;dur=-1", {}),
    ("queue;dur=nan, prefill;dur=inf", {}),
    ("total;dur=100", {}),
    ("", {}),
    (None, {}),
    ('queue;desc="never closed', {}),
]  # fmt: skip


@pytest.mark.parametrize(("header", "told"), HEADERS)
def test_a_server_timing_header_is_read_by_its_grammar(header: str | None, told: dict[str, float]) -> None:
    assert told_ms(evidence_of_header(header)) == told


def test_the_header_that_our_own_gateway_sends_is_read() -> None:
    header = "auth;dur=0.100, receive;dur=0.200, route;dur=0.1, gateway_queue;dur=3.000, connect;dur=0, upstream;dur=40"
    assert dict(metrics_of(header))["upstream"] == 40
    assert told_ms(evidence_of_header(header)) == {"queue_ms": 3.0}


@pytest.mark.parametrize("text", [";" * 1024, "a;" * 512, '"' * 1023, "a=" * 512, ('a;dur="' * 200)[:1024], "," * 1024])
def test_a_header_that_follows_no_grammar_is_read_at_once(text: str) -> None:
    assert list(metrics_of(text)) == list(metrics_of(text))
    assert evidence_of_header(text) is None


def test_a_header_gives_stages_a_residual_and_says_so() -> None:
    row = row_of(ledger(timings=None))
    evidence = evidence_of_header("queue;dur=18, prefill;dur=45")
    assert evidence is not None
    told = retold(row, evidence).timeline
    assert ms(told.stages) | {"x": 0} == {
        "auth": 1, "receive": 2, "route": 1.5, "gateway_queue": 1.5, "connect": 2.5, "send": 0.5,
        "engine_queue": 18, "engine_prefill": 45, "transit": 8, "relay": 1.5, "x": 0,
    }  # fmt: skip
    assert told.sources["engine_queue"] == "header"
    assert told.sources["transit"] == "derived"
    assert told.sources["auth"] == told.sources["relay"] == "relay"
    assert told.unaccounted is None, "a residual closes nothing"


# vLLM, as recorded from a stock 0.32


def recorded() -> list[Span]:
    return from_json(RECORDED.read_bytes()).spans


def test_the_stages_of_a_recorded_vllm_span_are_its_attributes_in_seconds() -> None:
    evidence = evidence_of_spans(recorded()[0])
    assert evidence is not None
    expected = {"queue_ms": 0.068599, "prompt_ms": 294.788061, "predicted_ms": 903.584919}
    assert told_ms(evidence) == pytest.approx(expected)
    assert evidence.engine_ttft == pytest.approx(0.3170745372772217)
    assert evidence.origin == "span"


def joined_vllm() -> tuple[Row, Span]:
    """A stream whose upstream sent the recorded span."""
    span = recorded()[0]
    marks = {"first_event": 330.0, "first_token": 330.0, "first_visible": 330.0, "first_token_written": 331.0}
    made = ledger(
        timings=None,
        trace_id=span.trace_id,
        attempts=[attempt(span_id=span.parent_id, end=1240.0)],
        upstream_end=1240.0, finish=1241.0, last_token=1239.0, **marks,
    )  # fmt: skip
    return row_of(made), span


def test_a_vllm_span_told_late_replaces_upstream_wait() -> None:
    row, span = joined_vllm()
    assert "upstream_wait" in row.timeline.stages
    evidence = evidence_of_spans(span)
    assert evidence is not None
    told = retold(row, evidence).timeline
    assert "upstream_wait" not in told.stages
    assert ms(told.stages)["engine_prefill"] == 294.788
    assert ms(told.stages)["transit"] == pytest.approx(321 - 294.788 - 0.069, abs=0.001)
    assert told.engine_ttft == pytest.approx(0.3170745)
    assert (told.sources["engine_prefill"], told.origin) == ("span", "span")
    assert told.after["engine_decode"] == pytest.approx(0.9035849)


def test_a_childless_vllm_span_gets_children_inside_its_own_interval_once() -> None:
    row, span = joined_vllm()
    children = {child.name: child for child in stand_ins(row, [span])}
    assert list(children) == ["queue", "prefill", "decode"]
    queue, prefill, decode = children.values()
    assert span.start_ns <= queue.start_ns
    assert queue.end_ns == prefill.start_ns
    assert prefill.end_ns == decode.start_ns == span.start_ns + round(0.3170745372772217e9)
    assert decode.end_ns <= span.end_ns
    assert [round((c.end_ns - c.start_ns) / 1e6, 3) for c in children.values()] == [0.069, 294.788, 903.585]
    for child in children.values():
        assert child.parent_id == span.span_id
        assert child.attributes[semconv.DERIVED] is True
        assert child.resource == span.resource
    assert prefill.attributes[semconv.PROMPT_TOKENS] == 31
    assert decode.attributes[semconv.OUTPUT_TOKENS] == 8
    assert stand_ins(row, [span]) == list(children.values()), "made twice they are the same spans"
    assert stand_ins(row, [span, *children.values()]) == [], "an engine with children gets none"


def test_every_answer_of_a_request_for_several_gets_children_of_its_own() -> None:
    row, _ = joined_vllm()
    children = stand_ins(row, recorded())
    assert [child.name for child in children] == ["queue", "prefill", "decode"] * 2
    assert len({child.span_id for child in children}) == 6


def test_without_a_time_to_first_token_the_row_begins_with_the_span() -> None:
    row, span = joined_vllm()
    attributes = {name: value for name, value in span.attributes.items() if name != semconv.LATENCY_TTFT}
    queue, _, _ = stand_ins(row, [msgspec.structs.replace(span, attributes=attributes)])
    assert queue.start_ns == span.start_ns


def test_an_aborted_vllm_request_sends_no_span_and_stays_upstream_wait() -> None:
    made = ledger(timings=None, first_token=None, first_token_written=None, client_gone=100.0)
    assert stand_ins(row_of(made), []) == []
    assert "upstream_wait" in row_of(made).timeline.stages


@pytest.mark.parametrize(
    "attributes",
    [
        {},
        {semconv.LATENCY_QUEUE: "0.5", semconv.LATENCY_PREFILL: True},
        {semconv.LATENCY_PREFILL: float("nan"), semconv.LATENCY_DECODE: float("inf")},
        {semconv.LATENCY_E2E: 1.5, semconv.LATENCY_TTFT: 0.5},
    ],
)
def test_a_span_that_tells_no_stage_is_no_evidence(attributes: dict[str, Any]) -> None:
    row, span = joined_vllm()
    mute = msgspec.structs.replace(span, attributes=attributes)
    assert evidence_of_spans(mute) is None
    assert stand_ins(row, [mute]) == []


# SGLang, after its documented names


def sglang(row: Row) -> list[Span]:
    """Root, a span for each process, and their stages; ms after BASE on the engine's clock."""
    trace_id, base = row.ledger.trace_id, 10**18

    def span(number: int, parent: str | None, name: str, start: float, end: float, **attributes: Any) -> Span:
        names = {key.replace("__", "."): value for key, value in attributes.items()}
        times = base + round(start * 1e6), base + round(end * 1e6)
        return Span(trace_id, f"{number:016x}", name, *times, parent_id=parent, attributes=names)

    root = span(
        1, row.ledger.attempts[-1].span_id, " Req 0af76519", 0, 160,
        **{"gen_ai__latency__time_to_first_token": 0.066, "gen_ai__latency__time_in_model_prefill": 0.063,
           "gen_ai__latency__time_in_model_decode": 0.094, "gen_ai__latency__e2e": 0.16,
           "gen_ai__usage__prompt_tokens": 31, "gen_ai__usage__cached_tokens": 16,
           "gen_ai__usage__completion_tokens": 51},
    )  # fmt: skip
    api = span(2, root.span_id, "tokenizer(host:abcd | pid:7)", 0, 3)
    scheduler = span(3, root.span_id, "scheduler [TP 0] (host:abcd | pid:8)", 3, 160)
    return [
        root, api, scheduler,
        span(4, api.span_id, "tokenize", 0, 2),
        span(5, api.span_id, "api_server_dispatch", 2, 3),
        span(6, scheduler.span_id, "prefill_waiting", 4, 22),
        span(7, scheduler.span_id, "prefill_forward", 22, 65),
        span(8, scheduler.span_id, "prefill_waiting", 90, 95),
        span(9, scheduler.span_id, "decode_forward", 65, 158),
    ]  # fmt: skip


def test_the_stage_spans_of_sglang_are_preferred_to_its_attributes_whose_prefill_holds_the_queue() -> None:
    root, *others = sglang(row_of(ledger()))
    assert is_engine_span(root)
    assert told_ms(evidence_of_spans(root, others)) == {
        "tokenize_ms": 2, "queue_ms": 18, "prompt_ms": 43, "predicted_ms": 93,
    }  # fmt: skip
    assert told_ms(evidence_of_spans(root)) == {"prompt_ms": 63, "predicted_ms": 94}


def test_sglang_gets_no_derived_children_beside_its_own() -> None:
    row = row_of(ledger(timings=None))
    assert stand_ins(row, sglang(row)) == []


# llama.cpp, as its server answers

LLAMA = b"""{"cache_n": 12, "prompt_n": 19, "prompt_ms": 45.0, "prompt_per_token_ms": 2.368, "prompt_per_second": 422.2,
 "predicted_n": 51, "predicted_ms": 100.0, "predicted_per_token_ms": 1.96, "predicted_per_second": 510.0,
 "draft_n": 4, "draft_n_accepted": 3}"""


def test_llama_cpp_tells_prefill_and_decode_and_the_rest_is_transit() -> None:
    timings = msgspec.json.decode(LLAMA, type=Timings)
    row = row_of(ledger(timings=timings))
    stages = ms(row.timeline.stages)
    assert (stages["engine_prefill"], stages["transit"]) == (45, 26)
    assert "engine_queue" not in stages
    assert row.timeline.sources["engine_prefill"] == "in_band"
    assert ms(row.timeline.after)["engine_decode"] == 100
    assert [span.name for span in stand_ins(row, [])] == ["llm_request", "prefill", "decode"]
    answer = row_of(whole(timings=timings)).timeline
    assert ms(answer.stages)["engine_decode"] == 100
    assert answer.engine_ttft is None, "its wait is not told"


# Any of them, and none


def test_an_upstream_that_tells_nothing_is_one_stage_of_the_gateways_own() -> None:
    row = row_of(ledger(timings=None))
    assert ms(row.timeline.stages)["upstream_wait"] == 71
    assert row.timeline.sources["upstream_wait"] == "relay"
    assert row.timeline.origin is None


def test_an_engine_in_band_is_the_source_of_its_stages_and_the_view_says_so() -> None:
    row = row_of(ledger())
    view = request_view(row, complete=True)
    assert view["sources"] == {
        **{name: "in_band" if name.startswith(("engine", "transit")) else "relay" for name in STREAM_STAGES_MS},
        "streaming": "relay", "closing": "relay", "engine_decode": "in_band",
    }  # fmt: skip
    assert decode_row(encode_row(row)) == row


@pytest.mark.parametrize(
    ("resource", "placement"),
    [
        ({}, "centred"),
        ({"host.id": "host"}, "centred"),
        ({"host.id": "host", "host.boot_id": "another"}, "centred"),
        ({"host.id": "host", "host.boot_id": "boot"}, "exact"),
    ],
)
def test_spans_of_another_clock_are_shown_centred_in_their_attempt(resource: dict[str, Any], placement: str) -> None:
    row, span = joined_vllm()
    span = msgspec.structs.replace(span, resource=resource)
    shown = {s.name: s for s in trace_of(row, [span]) if s.parent_id in (span.parent_id, span.span_id)}
    sent, end = (row.ledger.wall_ns + round(at * 1e6) for at in (9.0, 1240.0))
    engine = shown["llm_request"]
    if placement == "exact":
        assert (engine.start_ns, engine.end_ns) == (span.start_ns, span.end_ns)
        assert semconv.PLACEMENT not in engine.attributes, "as it came"
    else:
        assert abs((engine.start_ns - sent) - (end - engine.end_ns)) <= 1
        assert engine.attributes[semconv.PLACEMENT] == "centred"
    assert engine.end_ns - engine.start_ns == span.end_ns - span.start_ns
    for name in ("queue", "prefill", "decode"):
        assert engine.start_ns <= shown[name].start_ns <= shown[name].end_ns <= engine.end_ns
        assert shown[name].attributes[semconv.PLACEMENT] == placement


def test_spans_derived_from_marks_stay_where_the_marks_put_them() -> None:
    row = row_of(ledger())
    assert centred(row, stand_ins(row, [])) == stand_ins(row, [])


def test_spans_that_hang_in_a_circle_are_shown_as_they_came() -> None:
    row, span = joined_vllm()
    loop = [Span(span.trace_id, "1" * 16, "a", 1, 2, "2" * 16), Span(span.trace_id, "2" * 16, "b", 1, 2, "1" * 16)]
    assert centred(row, loop) == loop


def test_the_identity_of_a_host_without_a_name_is_nobodys() -> None:
    row, span = joined_vllm()
    nameless = msgspec.structs.replace(row, host=HostIdentity("", ""))
    assert stand_ins(nameless, [span])[0].attributes[semconv.PLACEMENT] == "centred"
