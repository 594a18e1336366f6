"""Spans made from a ledger: the tree, its times, its ids, its words for failure."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from ledgers import BASE_NS, ELSEWHERE, HERE, WALL_NS, at, attempt, ledger, timings, whole

from tracing import semconv
from tracing.derived import derived_engine_spans
from tracing.ledger import Ledger, Outcome
from tracing.observer.rows import Row
from tracing.observer.view import trace_of
from tracing.spans import (
    Span,
    SpanEvent,
    SpanKind,
    SpanLink,
    SpanStatus,
    derived_span_id,
    gateway_spans,
    weight_of,
)
from tracing.stages import timeline_of


def wall(ms: float) -> int:
    return WALL_NS + at(ms) - BASE_NS


def spans_of(made: Ledger) -> dict[str, Span]:
    return {span.name: span for span in gateway_spans(made, timeline_of(made, HERE))}


def derived_of(made: Ledger) -> dict[str, Span]:
    return {span.name: span for span in derived_engine_spans(made, made.attempts[-1], HERE)}


def test_the_tree_hangs_below_the_server_span_at_the_times_of_the_marks() -> None:
    spans = spans_of(ledger(parent_span_id="00000000000000aa"))
    found = {name: (span.kind, span.start_ns, span.end_ns) for name, span in spans.items()}
    assert found == {
        "POST /v1/chat/completions": (SpanKind.SERVER, wall(0), wall(186)),
        "auth": (SpanKind.INTERNAL, wall(0), wall(1)),
        "receive": (SpanKind.INTERNAL, wall(1), wall(3)),
        "route": (SpanKind.INTERNAL, wall(3), wall(4.5)),
        "queue": (SpanKind.INTERNAL, wall(4.5), wall(6)),
        "chat m-upstream": (SpanKind.CLIENT, wall(6), wall(185)),
        "relay": (SpanKind.INTERNAL, wall(78.5), wall(186)),
    }
    server = spans.pop("POST /v1/chat/completions")
    assert server.parent_id == "00000000000000aa"
    assert {span.parent_id for span in spans.values()} == {server.span_id}
    assert {span.trace_id for span in spans.values()} == {server.trace_id}
    assert spans["chat m-upstream"].span_id == ledger().attempts[0].span_id
    assert spans["relay"].resource["service.name"] == "tokenline-gateway"


def test_the_server_span_says_who_what_and_how_long() -> None:
    server = spans_of(ledger(key_alias="team-a", client_request_id="mine"))["POST /v1/chat/completions"]
    expected: dict[str, Any] = {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "url.path": "/api/v1/chat/completions",
        "http.response.status_code": 200,
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "m",
        "gen_ai.usage.input_tokens": 31,
        "gen_ai.usage.output_tokens": 51,
        "gen_ai.response.finish_reasons": ["stop"],
        "tokenline.request_id": "req_1",
        "tokenline.client_request_id": "mine",
        "tokenline.key_alias": "team-a",
        "tokenline.outcome": "ok",
    }
    assert expected.items() <= server.attributes.items()
    assert server.attributes["tokenline.ttft"] == pytest.approx(0.0815)
    assert "error.type" not in server.attributes
    assert server.status is SpanStatus.UNSET


def test_each_attempt_is_a_client_span_of_its_own() -> None:
    failed = attempt(1, upstream="dead", connected=None, request_sent=None, end=5.0, status=0, error="connect")
    spans = gateway_spans(made := ledger(attempts=[failed, attempt(2, upstream="alive")]), timeline_of(made, HERE))
    first, second = (span for span in spans if span.kind is SpanKind.CLIENT)
    assert (first.attributes[semconv.ATTEMPT], second.attributes[semconv.ATTEMPT]) == (1, 2)
    assert (first.attributes[semconv.UPSTREAM], second.attributes[semconv.UPSTREAM]) == ("dead", "alive")
    assert first.status is SpanStatus.ERROR
    assert first.attributes[semconv.ERROR_TYPE] == "connect"
    assert second.status is SpanStatus.UNSET
    assert first.span_id != second.span_id


@pytest.mark.parametrize(
    ("outcome", "status", "code", "error_type", "span_status"),
    [
        (Outcome.UPSTREAM_TIMEOUT, 504, "upstream_timeout", "upstream_timeout", SpanStatus.ERROR),
        (Outcome.UPSTREAM_ERROR, 200, None, "upstream_error", SpanStatus.ERROR),
        (Outcome.GATEWAY_ERROR, 500, None, "gateway_error", SpanStatus.ERROR),
        (Outcome.CLIENT_CANCELLED, 200, None, "client_cancelled", SpanStatus.UNSET),
        (Outcome.AUTH_ERROR, 401, "unknown_key", "unknown_key", SpanStatus.UNSET),
        (Outcome.QUEUE_REJECTED, 429, "queue_full", "queue_full", SpanStatus.UNSET),
    ],
)
def test_a_request_that_did_not_end_well_says_why(
    outcome: Outcome, status: int, code: str | None, error_type: str, span_status: SpanStatus
) -> None:
    server = spans_of(ledger(outcome=outcome, status=status, error_code=code))["POST /v1/chat/completions"]
    assert server.attributes[semconv.ERROR_TYPE] == error_type
    assert server.attributes[semconv.OUTCOME] == outcome.value
    assert server.status is span_status


def test_a_refused_request_has_only_the_spans_of_what_it_reached() -> None:
    marks = dict.fromkeys(("authenticated", "body_read", "routed", "admitted", "upstream_end", "first_token_written"))
    made = ledger(attempts=[], timings=None, status=401, outcome=Outcome.AUTH_ERROR, finish=1.0, **marks)
    assert set(spans_of(made)) == {"POST /v1/chat/completions"}


def test_a_path_of_no_surface_does_not_become_a_span_name() -> None:
    made = ledger(surface="unknown", path="/../../etc/passwd", attempts=[], timings=None)
    (server, *_) = gateway_spans(made, timeline_of(made, HERE))
    assert server.name == "POST"
    assert "http.route" not in server.attributes


def test_making_the_spans_twice_makes_the_same_spans() -> None:
    assert spans_of(ledger()) == spans_of(ledger())
    assert derived_of(ledger()) == derived_of(ledger())
    assert derived_span_id("a", "bc") != derived_span_id("ab", "c")


def test_two_requests_of_one_trace_share_no_span_id() -> None:
    first, second = ledger(), ledger(span_id="00000000000000fe", attempts=[attempt(2)])
    ids = [span.span_id for made in (first, second) for span in (*spans_of(made).values(), *derived_of(made).values())]
    assert len(ids) == len(set(ids))


def test_marks_on_our_clock_place_derived_spans_exactly() -> None:
    spans = derived_of(ledger())
    assert {name: (span.start_ns, span.end_ns) for name, span in spans.items()} == {
        "llm_request": (wall(10.5), wall(175.5)),
        "tokenize": (wall(10.5), wall(12.5)),
        "queue": (wall(12.5), wall(30.5)),
        "prefill": (wall(30.5), wall(75.5)),
        "decode": (wall(75.5), wall(175.5)),
    }
    request = spans.pop("llm_request")
    assert request.parent_id == ledger().attempts[0].span_id
    assert request.kind is SpanKind.SERVER
    assert {span.parent_id for span in spans.values()} == {request.span_id}
    for span in (request, *spans.values()):
        assert span.attributes[semconv.DERIVED] is True
        assert span.attributes[semconv.PLACEMENT] == "exact"


def test_durations_of_another_clock_are_centred_in_the_wait_and_keep_their_lengths() -> None:
    spans = derived_of(ledger(timings=timings(ELSEWHERE)))
    assert {name: (span.start_ns, span.end_ns) for name, span in spans.items()} == {
        "llm_request": (wall(12), wall(177)),
        "tokenize": (wall(12), wall(14)),
        "queue": (wall(14), wall(32)),
        "prefill": (wall(32), wall(77)),
        "decode": (wall(77), wall(177)),
    }, "wait 9 to 80, 65 ms of work: 3 ms on either side"
    assert spans["queue"].attributes[semconv.PLACEMENT] == "centred"


def test_a_whole_answers_durations_are_centred_with_its_decode() -> None:
    spans = derived_of(whole(timings=timings(ELSEWHERE)))
    assert spans["llm_request"].start_ns == wall(9 + (176 - 165) / 2)
    assert spans["decode"].end_ns == wall(185 - (176 - 165) / 2)


def test_derived_children_carry_what_the_engine_said() -> None:
    spans = derived_of(ledger())
    assert spans["queue"].attributes[semconv.ENGINE_WAITING] == 1
    assert spans["queue"].attributes[semconv.ENGINE_KV_USAGE] == 0.25
    assert spans["prefill"].attributes[semconv.PREFILL_CHUNKS] == 1
    assert spans["decode"].attributes[semconv.TOKEN_GAP] == pytest.approx(0.003)


def test_a_request_cut_in_prefill_has_no_decode_span() -> None:
    cut = ledger(timings=timings(last_token=None, prefill_end=None))
    assert set(derived_of(cut)) == {"llm_request", "tokenize", "queue"}


def test_nothing_reported_derives_nothing() -> None:
    assert derived_of(ledger(timings=None)) == {}
    assert derived_of(ledger(attempts=[attempt(request_sent=None)])) == {}


def test_a_request_is_shown_with_its_own_engine_spans_and_not_with_those_of_its_trace_mates() -> None:
    made = ledger()
    row = Row(made, timeline_of(made, HERE), HERE, True)
    mine = Span(made.trace_id, "b" * 16, "llm_request", 1, 2, parent_id=made.attempts[0].span_id)
    child = Span(made.trace_id, "c" * 16, "decode", 1, 2, parent_id=mine.span_id)
    strange = Span(made.trace_id, "d" * 16, "llm_request", 1, 2, parent_id="e" * 16)
    loop = Span(made.trace_id, "f" * 16, "loop", 1, 2, parent_id="f" * 16)
    names = [span.name for span in trace_of(row, [child, strange, mine, loop])]
    assert names.count("llm_request") == 1
    assert "decode" in names
    assert "queue" in names, "the gateway's own"
    assert "loop" not in names
    derived = [span for span in trace_of(row, []) if semconv.DERIVED in span.attributes]
    assert len(derived) == 5


def test_the_weight_of_a_span_is_that_of_all_that_it_carries() -> None:
    bare = Span("1" * 32, "2" * 16, "s", 1, 2)
    long = "x" * 10_000
    for heavy in (
        {"attributes": {"a": long}},
        {"attributes": {"a": ["b", {"c": [long]}]}},
        {"events": [SpanEvent("e", 1, {"a": long})]},
        {"links": [SpanLink("1" * 32, "2" * 16, {"a": long})]},
    ):
        assert 10_000 < weight_of(msgspec.structs.replace(bare, **heavy)) - weight_of(bare) < 11_000  # type: ignore[arg-type]
