"""The join of ledgers and engine spans, on a clock that the test owns."""

from __future__ import annotations

from typing import Any

import msgspec
from ledgers import HERE, attempt, ledger, numbered

from tracing.clock import FakeClock
from tracing.ledger import Ledger
from tracing.observer.join import MAX_SPANS_PER_TRACE, SETTLE_NS, Join
from tracing.observer.rows import Row
from tracing.spans import Span
from tracing.stages import timeline_of

WAIT_MS = 10_000


class Heard:
    """A sink that writes down what it is told."""

    def __init__(self) -> None:
        self.timings: list[tuple[str, bool, str | None]] = []
        self.complete: list[tuple[str, list[str], bool]] = []
        self.lates: list[tuple[list[str], bool]] = []
        self.orphans: list[tuple[str, list[str]]] = []
        self.overflow = 0

    def timed(self, row: Row, *, changed: bool) -> None:
        self.timings.append((row.ledger.request_id, changed, row.timeline.placement))

    def completed(self, row: Row, spans: list[Span], *, derive: bool) -> None:
        self.complete.append((row.ledger.request_id, sorted(span.name for span in spans), derive))

    def late(self, trace_id: str, spans: list[Span], *, kept: bool) -> None:
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
    assert heard.complete == [("req_1", ALL, False)]
    assert not join.waits_for(ledger())


def test_spans_that_come_first_wait_for_their_ledger() -> None:
    join, heard, _ = joining()
    join.spans(engine_spans(ledger()))
    join.closed(row())
    assert heard.complete == [("req_1", ALL, False)]


def test_children_that_come_in_another_order_than_their_parent_find_the_request() -> None:
    join, heard, _ = joining()
    join.closed(row())
    request, queue, prefill = engine_spans(ledger())
    join.spans([prefill])
    join.spans([queue, request])
    assert heard.complete == [("req_1", ALL, False)]


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
    assert heard.complete == [("req_1", [], False)]


def test_timings_without_spans_are_derived_when_the_wait_is_over() -> None:
    join, heard, clock = joining()
    join.closed(row())
    clock.advance_ms(WAIT_MS)
    join.tick()
    assert heard.complete == [("req_1", [], True)]


def test_a_request_that_never_reached_an_upstream_waits_for_nobody() -> None:
    join, heard, _ = joining()
    join.closed(row(ledger(attempts=[], timings=None)))
    assert heard.timings == [("req_1", False, None)]
    assert heard.complete == [("req_1", [], False)]
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
    assert heard.complete == [("req_1", ["llm_request"], False)]
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
    assert heard.complete == [("req_1", ALL, False)]
    assert heard.lates == []


def test_a_span_sent_twice_is_taken_once() -> None:
    join, heard, _ = joining()
    join.spans(engine_spans(ledger()))
    join.spans(engine_spans(ledger()))
    join.closed(row())
    join.spans(engine_spans(ledger()))
    assert heard.complete == [("req_1", ALL, False)]
    assert heard.lates == []


def test_the_span_of_an_earlier_attempt_does_not_complete_the_request() -> None:
    join, heard, _ = joining()
    made = ledger(attempts=[attempt(1), attempt(2)])
    join.closed(row(made))
    first = msgspec.structs.replace(made, attempts=made.attempts[:1])
    join.spans(engine_spans(first))
    assert heard.complete == []
    join.spans(engine_spans(made))
    assert heard.complete == [("req_1", sorted(ALL + ALL), False)]


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
    assert sorted(heard.complete) == [("req_1", ALL, False), ("req_2", ALL, False)]


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
    assert [request_id for request_id, _, _ in heard.complete] == ["req_0", "req_1"]


def test_the_number_of_unknown_traces_is_bounded() -> None:
    join, heard, _ = joining(max_requests=3)
    for number in range(10):
        join.spans([Span(f"{number + 1:032x}", "1" * 16, "s", 1, 2)])
    assert len(heard.orphans) == 4


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
    assert heard.orphans == [(ledger().trace_id, ["a", "b"])]


def test_finish_ends_every_wait() -> None:
    join, heard, _ = joining()
    join.closed(row())
    join.spans([Span("9" * 32, "1" * 16, "s", 1, 2)])
    join.finish()
    assert heard.complete == [("req_1", [], True)]
    assert heard.orphans == [("9" * 32, ["s"])]
