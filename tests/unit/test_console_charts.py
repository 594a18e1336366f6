"""The console's charts: every bar lies where its stage did, and shows the number of the JSON."""

from __future__ import annotations

from typing import Any

import pytest
from ledgers import ELSEWHERE, HERE, STREAM_STAGES_MS, attempt, ledger, timings, whole

from dashboards.console import charts
from dashboards.console.axis import Axis
from dashboards.console.ranges import ROOM, figures, ranges
from dashboards.console.span_tree import MAX_SHOWN, span_tree
from protocol.timings import Timings
from tracing.ledger import Ledger
from tracing.observer.rows import Row
from tracing.observer.view import request_view, span_view, trace_of
from tracing.stages import timeline_of


def record(made: Ledger, **more: Any) -> dict[str, Any]:
    """The request as the admin API gives it."""
    row = Row(made, timeline_of(made, HERE), HERE, True)
    spans = [span_view(span) for span in trace_of(row, [])]
    return {**request_view(row, complete=True), "spans": spans, **more}


def starts(chart: charts.Chart) -> dict[str, float | None]:
    return {bar.name: bar.start_ms for bar in chart.bars}


def test_every_stage_begins_at_its_mark_and_is_as_long_as_the_json_says() -> None:
    made = record(ledger())
    chart = charts.stages_chart(made)
    expected = {
        "auth": 0.0, "receive": 1.0, "route": 3.0, "gateway_queue": 4.5, "connect": 6.0, "send": 8.5,
        "transit_out": 9.0, "engine_tokenize": 10.5, "engine_queue": 12.5, "engine_prefill": 30.5, "engine_emit": 75.5,
        "transit_back": 77.0, "relay": 80.0, "unaccounted": None,
    }  # fmt: skip
    assert starts(chart) == expected
    assert {bar.name: bar.ms for bar in chart.bars} == pytest.approx({**STREAM_STAGES_MS, "unaccounted": 0.0})
    prefill = next(bar for bar in chart.bars if bar.name == "engine_prefill")
    ((place, length),) = prefill.segments
    assert place == pytest.approx(30.5 / 81.5 * 100, abs=0.01)
    assert length == pytest.approx(45.0 / 81.5 * 100, abs=0.01)
    assert prefill.share == pytest.approx(45.0 / 81.5)


def test_stages_of_a_whole_answer_end_where_the_answer_ends() -> None:
    chart = charts.stages_chart(record(whole()))
    found = starts(chart)
    assert (found["engine_decode"], found["engine_emit"], found["closing"]) == (75.5, 175.5, 185.0)
    last = next(bar for bar in chart.bars if bar.name == "closing")
    assert sum(last.segments[0]) == pytest.approx(100.0, abs=0.01)


def test_a_time_that_no_stage_covers_is_drawn_where_it_lies() -> None:
    made = record(ledger(attempts=[attempt(connect_start=7.0)]))
    unaccounted = charts.stages_chart(made).bars[-1]
    assert (unaccounted.name, unaccounted.ms) == ("unaccounted", pytest.approx(made["unaccounted_ms"]))
    assert unaccounted.ms == pytest.approx(1.0)
    ((place, length),) = unaccounted.segments
    assert place == pytest.approx(6.0 / 81.5 * 100, abs=0.01)
    assert length == pytest.approx(1.0 / 81.5 * 100, abs=0.01)


def test_failed_attempts_lie_before_the_last_attempts_connect() -> None:
    never = dict.fromkeys(("connected", "request_sent", "upstream_headers", "upstream_first_byte"))
    tries = [attempt(1, upstream="dead", error="connect", end=7.0, **never), attempt(2)]
    tries[1].connect_start += 1_000_000
    found = starts(charts.stages_chart(record(ledger(attempts=tries))))
    assert (found["failed_attempts"], found["connect"]) == (6.0, 7.0)
    first, second = charts.attempts_chart(record(ledger(attempts=tries))).bars
    assert (first.start_ms, first.ms, second.start_ms) == (6.0, pytest.approx(1.0), 7.0)


def test_stages_of_another_hosts_clock_stand_in_the_middle_of_the_wait_between_two_halves_of_transit() -> None:
    made = record(ledger(timings=timings(ELSEWHERE)))
    found = {bar.name: bar for bar in charts.stages_chart(made).bars}
    assert "unaccounted" not in found
    assert len(found["transit"].segments) == 2
    assert found["engine_tokenize"].start_ms == pytest.approx(9.0 + 6.0 / 2)
    assert found["engine_queue"].start_ms == pytest.approx(14.0)
    (first_at, first), (second_at, second) = found["transit"].segments
    assert first == pytest.approx(second, abs=0.01)
    assert first_at == pytest.approx(9.0 / 81.5 * 100, abs=0.01)
    assert second_at + second == pytest.approx(80.0 / 81.5 * 100, abs=0.01)


def test_a_negative_stage_is_drawn_back_from_its_start_and_said_to_be_negative() -> None:
    made = record(ledger(timings=timings(received=8.0)))
    found = {bar.name: bar for bar in charts.stages_chart(made).bars}
    assert found["transit_out"].ms == -1.0
    assert found["transit_out"].is_negative
    ((place, length),) = found["transit_out"].segments
    assert place == pytest.approx(8.0 / 81.5 * 100, abs=0.01)
    assert length == pytest.approx(1.0 / 81.5 * 100, abs=0.01)


def test_what_lies_inside_streaming_comes_after_the_parts_that_sum() -> None:
    chart = charts.after_chart(record(ledger(timings=timings(preempted_ms=4.0))))
    assert chart is not None
    names = [bar.name for bar in chart.bars]
    assert names[:2] == ["streaming", "closing"]
    assert set(names[2:]) >= {"engine_decode", "preempted"}
    by_name = {bar.name: bar for bar in chart.bars}
    assert by_name["streaming"].start_ms == 81.5
    assert by_name["engine_decode"].start_ms == 75.5
    assert by_name["preempted"].start_ms is None
    assert by_name["preempted"].segments == ()


def test_a_request_that_got_nowhere_has_charts_without_bars() -> None:
    marks = dict.fromkeys(("authenticated", "body_read", "routed", "admitted", "first_event", "first_token"))
    more = dict.fromkeys(("first_visible", "first_token_written", "last_token", "upstream_end", "finish"))
    made = record(ledger(attempts=[], timings=None, **marks, **more))
    assert charts.stages_chart(made).bars == ()
    assert charts.after_chart(made) is None
    assert charts.whole_chart(made) is None
    assert charts.attempts_chart(made).bars == ()
    assert charts.shares(made) == ()


@pytest.mark.parametrize(
    ("begin", "end", "labels"),
    [
        (0.0, 81.5, ["0", "20", "40", "60", "80"]),
        (75.5, 186.0, ["100", "150"]),
        (0.0, 0.9, ["0.0", "0.2", "0.4", "0.6", "0.8"]),
        (0.0, 1_000.0, ["0", "200", "400", "600", "800", "1,000"]),
        (0.0, 0.0, []),
    ],
)
def test_ticks_are_round_and_few(begin: float, end: float, labels: list[str]) -> None:
    ticks = Axis(begin, end).ticks()
    assert [label for _, label in ticks] == labels
    assert all(0 <= place <= 100 for place, _ in ticks)


def test_a_range_goes_from_p50_to_p99_with_this_request_as_a_dot() -> None:
    usual = {"engine_queue": {"p50_ms": 2.0, "p95_ms": 6.0, "p99_ms": 9.0}, "auth": {"p50_ms": None}}
    made = record(ledger(), baseline={"requests": 400, "class": "1-128", "stages": usual})
    (found,) = ranges(made)
    axis_ms = 18.0 * ROOM
    assert (found.name, found.ms, found.is_over) == ("engine_queue", 18.0, True)
    assert found.place == pytest.approx(18.0 / axis_ms * 100, abs=0.01)
    assert found.band == pytest.approx((2.0 / axis_ms * 100, 7.0 / axis_ms * 100), abs=0.01)
    assert found.p95_place == pytest.approx(6.0 / axis_ms * 100, abs=0.01)
    assert ranges(record(ledger())) == []


@pytest.mark.parametrize(("p99_ms", "is_over"), [(18.0, False), (17.5, False), (17.0, True)])
def test_only_what_is_surely_over_p99_is_said_to_be(p99_ms: float, is_over: bool) -> None:
    usual = {"stages": {"engine_queue": {"p50_ms": 2.0, "p95_ms": 6.0, "p99_ms": p99_ms}}}
    (found,) = ranges(record(ledger(), baseline=usual))
    assert found.is_over == is_over


def test_figures_are_compared_too_and_nothing_is_while_the_class_is_too_new() -> None:
    quantiles = {"p50_ms": 40.0, "p95_ms": 70.0, "p99_ms": 90.0}
    usual = {"compared_with": "class", "stages": {"auth": quantiles}, "figures": {"ttft_ms": {"p50": 40, "p99": 81.5}}}
    (found,) = figures(record(ledger(), baseline=usual))
    assert (found.name, found.ms, found.p50_ms, found.p95_ms, found.is_over) == ("TTFT", 81.5, 40, None, False)
    young = record(ledger(), baseline={**usual, "compared_with": "none"})
    assert (figures(young), ranges(young)) == ([], [])


def test_spans_come_parents_first_with_their_depth_and_are_marked_when_derived() -> None:
    tree = span_tree(record(ledger()))
    depths = {span.bar.name: span.depth for span in tree.spans}
    assert depths["POST /v1/chat/completions"] == 0
    assert (depths["chat m-upstream"], depths["llm_request"], depths["prefill"]) == (1, 2, 3)
    assert {span.bar.name for span in tree.spans if span.is_derived} >= {"llm_request", "prefill", "decode"}
    assert tree.derived + tree.emitted == tree.count == len(tree.spans)


def test_spans_that_hang_in_a_circle_or_without_a_parent_are_shown_and_a_flood_is_cut() -> None:
    made = record(ledger(timings=None))
    spans = made["spans"]
    loop = [
        {**spans[0], "span_id": a, "parent_id": b, "name": a} for a, b in (("a" * 16, "b" * 16), ("b" * 16, "a" * 16))
    ]
    made["spans"] = [*spans, *loop, {**spans[0], "span_id": "c" * 16, "parent_id": "d" * 16, "name": "orphan"}]
    tree = span_tree(made)
    assert {"a" * 16, "b" * 16, "orphan"} <= {span.bar.name for span in tree.spans}
    made["spans"] = [{**spans[0], "span_id": f"{n:016x}", "parent_id": None} for n in range(MAX_SHOWN + 5)]
    tree = span_tree(made)
    assert (len(tree.spans), tree.count) == (MAX_SHOWN, MAX_SHOWN + 5)


def test_llama_cpp_timings_are_drawn_though_no_mark_came() -> None:
    made = record(ledger(timings=Timings(prompt_ms=45.0, predicted_ms=100.0)))
    found = {bar.name: bar for bar in charts.stages_chart(made).bars}
    assert found["engine_prefill"].segments
    assert found["engine_prefill"].start_ms is not None
    assert found["engine_prefill"].start_ms > 9.0
