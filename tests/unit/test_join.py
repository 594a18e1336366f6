"""The join of ledgers and engine spans, on a clock that the test owns."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from ledgers import HERE, attempt, ledger, numbered

from tracing.clock import FakeClock
from tracing.ledger import Ledger
from tracing.observer.adapters import evidence_of_header, retold
from tracing.observer.join import MAX_SPANS_PER_TRACE, SETTLE_NS, Join
from tracing.observer.rows import Row
from tracing.spans import Span
from tracing.stages import timeline_of

WAIT_MS = 10_000
SGLANG_ROOT = {
    "gen_ai.latency.time_to_first_token": 0.009,
    "gen_ai.latency.time_in_model_prefill": 0.008,
    "gen_ai.latency.time_in_model_decode": 0.1,
}


class Heard:
    """A sink that writes down what it is told."""

    def __init__(self) -> None:
        self.timings: list[tuple[str, bool, str | None]] = []
        self.complete: list[tuple[str, list[str]]] = []
        self.lates: list[tuple[list[str], bool]] = []
        self.orphans: list[tuple[str, list[str]]] = []
        self.overflow = 0
        self.origins: list[str | None] = []
        self.stages: list[dict[str, float]] = []

    def timed(self, row: Row, *, changed: bool) -> None:
        self.timings.append((row.ledger.request_id, changed, row.timeline.placement))
        self.origins.append(row.timeline.origin)
        engine = {name: s for name, s in row.timeline.stages.items() if name.startswith("engine_")}
        self.stages.append({name: round(seconds * 1e3, 6) for name, seconds in engine.items()})

    def completed(self, row: Row, spans: list[Span]) -> None:
        self.complete.append((row.ledger.request_id, sorted(span.name for span in spans)))

    def late(self, trace_id: str, spans: list[Span], *, kept: bool, upstream: str) -> None:
        self.lates.append((sorted(span.name for span in spans), kept))

    def orphaned(self, trace_id: str, spans: list[Span]) -> None:
        self.orphans.append((trace_id, sorted(span.name for span in spans)))

    def overflowed(self, span: Span) -> None:
        self.overflow += 1


def row(made: Ledger | None = None, *, kept: bool = True) -> Row:
    made = made or ledger()
    return Row(made, timeline_of(made, HERE), HERE, kept)


def engine_spans(made: Ledger, **attributes: Any) -> list[Span]:
    """llm_request below the last attempt, and two children."""
    base = int(made.attempts[-1].span_id, 16) << 8
    ids = [f"{base + n:016x}" for n in range(1, 4)]
    request = Span(made.trace_id, ids[0], "llm_request", 1, 9, made.attempts[-1].span_id, attributes=attributes)
    return [
        request,
        Span(made.trace_id, ids[1], "queue", 1, 2, ids[0]),
        Span(made.trace_id, ids[2], "prefill", 2, 3, ids[0]),
    ]


def joining(**options: Any) -> tuple[Join, Heard, FakeClock]:
    heard, clock = Heard(), FakeClock()
    return Join(heard, clock, wait_ms=WAIT_MS, **options), heard, clock


ALL = ["llm_request", "prefill", "queue"]


def test_a_ledger_and_then_its_spans_are_one_complete_trace() -> None:
    join, heard, _ = joining()
    join.closed(row())
    assert join.waits_for(ledger())
    assert heard.complete == []
    join.spans(engine_spans(ledger()))
    assert heard.complete == [("req_1", ALL)]
    assert not join.waits_for(ledger())


def test_spans_that_come_first_wait_for_their_ledger() -> None:
    join, heard, _ = joining()
    join.spans(engine_spans(ledger()))
    join.closed(row())
    assert heard.complete == [("req_1", ALL)]


def test_children_that_come_in_another_order_than_their_parent_find_the_request() -> None:
    join, heard, _ = joining()
    join.closed(row())
    request, queue, prefill = engine_spans(ledger())
    join.spans([prefill])
    join.spans([queue, request])
    assert heard.complete == [("req_1", ALL)]


def test_stages_are_reported_at_the_end_when_timings_came_in_band_and_never_again() -> None:
    join, heard, clock = joining()
    join.closed(row())
    assert heard.timings == [("req_1", False, "exact")]
    join.spans(engine_spans(ledger(), **{"gen_ai.latency.time_in_model_prefill": 0.04}))
    clock.advance_ms(2 * WAIT_MS)
    join.tick()
    assert len(heard.timings) == 1


def test_without_timings_stages_are_reported_when_the_engine_span_came() -> None:
    join, heard, clock = joining()
    made = ledger(timings=None)
    join.closed(row(made))
    assert heard.timings == []
    join.spans(engine_spans(made, **{"gen_ai.latency.time_in_model_prefill": 0.04}))
    assert heard.timings == [("req_1", True, "durations")]
    clock.advance_ms(2 * WAIT_MS)
    join.tick()
    assert len(heard.timings) == 1


def test_without_timings_or_span_stages_are_reported_when_the_wait_is_over() -> None:
    join, heard, clock = joining()
    join.closed(row(ledger(timings=None)))
    clock.advance_ms(WAIT_MS - 1)
    join.tick()
    assert heard.timings == []
    clock.advance_ms(1)
    join.tick()
    assert heard.timings == [("req_1", False, None)]
    assert heard.complete == [("req_1", [])]


def test_timings_without_spans_are_derived_when_the_wait_is_over() -> None:
    join, heard, clock = joining()
    join.closed(row())
    clock.advance_ms(WAIT_MS)
    join.tick()
    assert heard.complete == [("req_1", [])]


def test_a_request_that_never_reached_an_upstream_waits_for_nobody() -> None:
    join, heard, _ = joining()
    join.closed(row(ledger(attempts=[], timings=None)))
    assert heard.timings == [("req_1", False, None)]
    assert heard.complete == [("req_1", [])]
    join.closed(row(ledger(attempts=[attempt(request_sent=None)], timings=None)))
    assert len(heard.complete) == 2


def test_an_engine_span_without_children_completes_after_a_short_while() -> None:
    join, heard, clock = joining()
    join.closed(row())
    request, queue, _ = engine_spans(ledger())
    join.spans([request])
    clock.advance_ms(SETTLE_NS / 1e6 - 1)
    join.tick()
    assert heard.complete == []
    clock.advance_ms(1)
    join.tick()
    assert heard.complete == [("req_1", ["llm_request"])]
    join.spans([queue])
    assert heard.lates == [(["queue"], True)]


def test_children_in_a_second_batch_soon_after_are_not_late() -> None:
    join, heard, clock = joining()
    join.closed(row())
    request, *children = engine_spans(ledger())
    join.spans([request])
    clock.advance_ms(100)
    join.tick()
    join.spans(children)
    assert heard.complete == [("req_1", ALL)]
    assert heard.lates == []


def test_a_span_sent_twice_is_taken_once() -> None:
    join, heard, _ = joining()
    join.spans(engine_spans(ledger()))
    join.spans(engine_spans(ledger()))
    join.closed(row())
    join.spans(engine_spans(ledger()))
    assert heard.complete == [("req_1", ALL)]
    assert heard.lates == []


def test_the_span_of_an_earlier_attempt_does_not_complete_the_request() -> None:
    join, heard, _ = joining()
    made = ledger(attempts=[attempt(1), attempt(2)])
    join.closed(row(made))
    first = msgspec.structs.replace(made, attempts=made.attempts[:1])
    join.spans(engine_spans(first))
    assert heard.complete == []
    join.spans(engine_spans(made))
    assert heard.complete == [("req_1", sorted(ALL + ALL))]


def test_spans_of_nobodys_trace_leave_when_the_wait_is_over() -> None:
    join, heard, clock = joining()
    join.spans(engine_spans(ledger()))
    clock.advance_ms(WAIT_MS)
    join.tick()
    assert heard.orphans == [(ledger().trace_id, ALL)]
    assert join.spans_of(ledger().trace_id) == []


def test_two_requests_of_one_trace_get_their_own_spans() -> None:
    join, heard, _ = joining()
    first = ledger()
    second = ledger(request_id="req_2", span_id="00000000000000fe", attempts=[attempt(7)])
    join.closed(row(first))
    join.closed(row(second))
    join.spans([*engine_spans(second), *engine_spans(first)])
    assert sorted(heard.complete) == [("req_1", ALL), ("req_2", ALL)]


def test_a_client_that_uses_one_trace_id_for_ever_keeps_no_memory() -> None:
    join, heard, clock = joining()
    for number in range(300):
        made = ledger(request_id=f"req_{number}", attempts=[attempt(1, span_id=f"{number + 1:016x}")])
        join.closed(row(made))
        join.spans(engine_spans(made))
        clock.advance_ms(100)
        join.tick()
    assert len(heard.complete) == 300
    assert heard.overflow == 0
    (trace,) = join._traces.values()
    assert len(trace.parents) <= 3 * (WAIT_MS // 100 + 1)
    assert len(trace.owners) <= WAIT_MS // 100 + 1


def test_the_number_of_waiting_requests_is_bounded_and_the_oldest_is_ended_first() -> None:
    join, heard, _ = joining(max_requests=3)
    for number in range(5):
        join.closed(row(numbered(number)))
    assert [request_id for request_id, _ in heard.complete] == ["req_0", "req_1"]


def test_the_number_of_unknown_traces_is_bounded() -> None:
    join, heard, _ = joining(max_requests=3)
    for number in range(10):
        join.spans([Span(f"{number + 1:032x}", "1" * 16, "s", 1, 2)])
    assert len(heard.orphans) == 7


def test_spans_over_the_limit_of_a_trace_are_counted() -> None:
    join, heard, _ = joining()
    join.spans(Span("1" * 32, f"{n + 1:016x}", "s", 1, 2) for n in range(MAX_SPANS_PER_TRACE + 5))
    assert heard.overflow == 5


def test_spans_whose_parents_go_round_in_a_circle_end_with_the_wait() -> None:
    join, heard, clock = joining()
    join.closed(row())
    join.spans([Span(ledger().trace_id, "1" * 16, "a", 1, 2, "2" * 16)])
    join.spans([Span(ledger().trace_id, "2" * 16, "b", 1, 2, "1" * 16)])
    clock.advance_ms(WAIT_MS)
    join.tick()
    assert heard.orphans == [], "they may be of another request of the trace, and have a wait of their own"
    clock.advance_ms(WAIT_MS)
    join.tick()
    assert heard.orphans == [(ledger().trace_id, ["a", "b"])]


def test_finish_ends_every_wait() -> None:
    join, heard, _ = joining()
    join.closed(row())
    join.spans([Span("9" * 32, "1" * 16, "s", 1, 2)])
    join.finish()
    assert heard.complete == [("req_1", [])]
    assert heard.orphans == [("9" * 32, ["s"])]


def header_row() -> Row:
    """A request of which only the upstream's header tells."""
    evidence = evidence_of_header("queue;dur=18, prefill;dur=45")
    assert evidence is not None
    return retold(row(ledger(timings=None)), evidence)


def test_what_a_header_told_waits_for_a_span_that_tells_better() -> None:
    join, heard, clock = joining()
    join.closed(header_row())
    assert heard.timings == []
    join.spans(engine_spans(ledger())[:1])
    clock.advance_ms(SETTLE_NS / 1e6)
    join.tick()
    assert heard.timings == [("req_1", False, "durations")], "this span tells nothing: the header's word stands"


def test_what_a_header_told_stands_when_no_span_comes() -> None:
    join, heard, clock = joining()
    join.closed(header_row())
    clock.advance_ms(WAIT_MS)
    join.tick()
    assert heard.timings == [("req_1", False, "durations")]
    assert heard.origins == ["header"]


def test_a_span_replaces_what_a_header_told() -> None:
    join, heard, _ = joining()
    join.closed(header_row())
    join.spans(engine_spans(ledger()))
    assert heard.origins == ["span"]


def test_an_engine_that_hangs_its_stages_deeper_is_waited_for_until_they_settle() -> None:
    """As SGLang does: a root with attributes, a span for each process below it, the stages below those."""
    join, heard, clock = joining()
    made = ledger(timings=None)
    join.closed(row(made))
    root = Span(made.trace_id, "a" * 16, "Req 1", 1, 9, made.attempts[-1].span_id, attributes=SGLANG_ROOT)
    thread = Span(made.trace_id, "b" * 16, "scheduler (host:1 | pid:2)", 1, 9, root.span_id)
    join.spans([root])
    assert heard.timings == []
    waiting = Span(made.trace_id, "c" * 16, "prefill_waiting", 1_000_000, 4_000_000, thread.span_id)
    forward = Span(made.trace_id, "d" * 16, "prefill_forward", 4_000_000, 9_000_000, thread.span_id)
    join.spans([waiting, thread, forward])
    assert heard.complete == []
    clock.advance_ms(SETTLE_NS / 1e6)
    join.tick()
    assert heard.complete == [("req_1", ["Req 1", "prefill_forward", "prefill_waiting", "scheduler (host:1 | pid:2)"])]
    assert heard.stages == [{"engine_queue": 3.0, "engine_prefill": 5.0}]


def test_the_stages_of_an_earlier_attempt_do_not_tell_the_last_one() -> None:
    join, heard, _ = joining()
    made = ledger(timings=None, attempts=[attempt(1, end=60.0), attempt(2, connect_start=61.0)])
    join.closed(row(made))
    first, last = made.attempts
    join.spans(
        [
            Span(made.trace_id, "a" * 16, "llm_request", 1, 9, first.span_id),
            Span(made.trace_id, "b" * 16, "queue", 0, 99_000_000, "a" * 16),
            Span(made.trace_id, "c" * 16, "llm_request", 1, 9, last.span_id),
            Span(made.trace_id, "d" * 16, "queue", 0, 7_000_000, "c" * 16),
        ]
    )
    assert heard.stages == [{"engine_queue": 7.0}]


def test_a_flood_of_strays_leaves_room_for_spans_of_known_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tracing.observer.join.MAX_HELD_BYTES", 100_000)
    join, heard, _ = joining()
    join.closed(row())
    for number in range(1000):
        join.spans([Span(f"{number + 1:032x}", "1" * 16, "s", 1, 2, attributes={"text": "x" * 1000})])
    assert 1000 - heard.overflow == pytest.approx(50_000 / 1800, abs=2)
    join.spans(engine_spans(ledger()))
    assert heard.complete == [("req_1", ALL)]


def test_memory_of_spans_is_given_back_however_they_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tracing.observer.join.MAX_HELD_BYTES", 20_000)
    monkeypatch.setattr("tracing.observer.join.MAX_SPAN_IDS", 20)
    join, heard, clock = joining()
    for number in range(50):
        made = numbered(number)
        join.closed(row(made))
        join.spans(engine_spans(made))
        join.spans([Span(made.trace_id, f"{number + 1:016x}", "decode", 1, 2, made.attempts[-1].span_id)])
        join.spans([Span(f"{number + 900:032x}", "1" * 16, "stray", 1, 2)])
        clock.advance_ms(2 * WAIT_MS)
        join.tick()
    assert heard.overflow == 0
    assert len(heard.complete) == len(heard.lates) == len(heard.orphans) == 50
