"""The verdict of a window: groups, what makes the difference, and what slowness goes with."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from judging import Court, delayed, row_of
from ledgers import WALL_NS, numbered, timings

from protocol.timings import EngineState
from tracing.clock import FakeClock
from tracing.ledger import Ledger, Outcome, Usage
from tracing.observer import window_rows
from tracing.observer.ranks import chance_correlation, quantile, rank_correlation
from tracing.observer.store import AddRow, Store
from tracing.observer.verdict import Judge
from tracing.observer.window_evidence import KINDS, correlations, goes_with
from tracing.observer.window_rows import Line, WindowRows
from tracing.observer.window_verdict import judge_window
from tracing.observer.window_wording import window_story

SECOND_NS = 1_000_000_000
COUNT = 300
SLOW = range(150, 156)
"""Numbers of the slow ones among COUNT requests, one a second."""


def engine(waiting: int) -> EngineState:
    return EngineState(running=3 + waiting, waiting=waiting, kv_usage=0.25, batch=4)


def request(number: int, late_ms: float = 0.0, mark_ms: float = 30.5, waiting: int = 0, tokens: int = 31) -> Ledger:
    """One a second, a little unlike the others, and `late_ms` late from a mark on."""
    made = numbered(
        number,
        wall_ns=WALL_NS + number * SECOND_NS,
        usage=Usage(input_tokens=tokens, output_tokens=51, source="usage"),
        timings=timings(engine=engine(waiting), prompt_n=tokens),
    )
    return delayed(mark_ms, late_ms + number % 17 / 10, made)


def usual(number: int) -> Ledger:
    return request(number, waiting=number % 2, tokens=20 + number % 11)


def ordinary() -> list[Ledger]:
    return [usual(number) for number in range(COUNT) if number not in SLOW]


def with_slow(slow: list[Ledger]) -> list[Ledger]:
    """COUNT requests, some of them these."""
    taken = {one.request_id for one in slow}
    return [one for one in map(usual, range(COUNT)) if one.request_id not in taken] + slow


def view_of(
    folder: Path, made: Iterable[Ledger], language: Any = "en", *, model: str | None = None, since_ns: int = WALL_NS
) -> dict[str, Any]:
    """The window's JSON, of rows that went through the store."""
    path = folder / "traces.sqlite"
    store = Store(
        path,
        max_rows=10_000,
        max_traces=10,
        max_age_seconds=10**9,
        clock=FakeClock(),
        dropped=lambda reason, count: pytest.fail(reason),
    )
    store.open()
    court = Court()
    for one in made:
        row = row_of(one)
        store.put(AddRow(row))
        court.baselines.add(row)
    store.close()
    rows = WindowRows(path, since_ns=since_ns, model=model)
    rows.read()
    return judge_window(rows, Judge(court.baselines, court.settings, WALL_NS), language, "1h")


def test_the_slowest_hundredth_is_held_against_the_median_half(tmp_path):
    slow = [request(number, late_ms=500, waiting=20) for number in SLOW]
    view = view_of(tmp_path, ordinary() + slow)
    assert view["requests"] == COUNT
    assert view["slowest"]["requests"] == 3
    assert view["median_half"]["requests"] == 150
    assert view["slowest"]["stages_mean_ms"]["engine_queue"] == pytest.approx(18 + 500 + 0.8, abs=1)
    assert view["median_half"]["stages_mean_ms"]["engine_queue"] == pytest.approx(18.8, abs=0.2)
    assert view["difference"][0]["stage"] == "engine_queue"
    assert view["difference"][0]["share"] == 1.0
    assert view["ttft_ms"]["p50"] == pytest.approx(82.3, abs=0.2)
    assert view["ttft_ms"]["p99"] > 500
    assert view["ttft_ms"]["requests"] == COUNT
    assert view["causes"] == [{"cause": "engine_queue", "requests": 3, "share": 1.0}]
    assert view["verdict"]["cause"] == "engine_queue"
    assert view["verdict"]["action_id"] == "spread_load"
    assert set(view["slowest"]["request_ids"]) <= {one.request_id for one in slow}


def test_slowness_that_goes_with_the_queue_goes_with_time(tmp_path):
    view = view_of(tmp_path, ordinary() + [request(number, late_ms=500, waiting=20) for number in SLOW])
    assert view["goes_with"] == "time"
    waiting = view["evidence"]["time"]["engine_waiting"]
    assert waiting["is_significant"]
    assert waiting["slowest_mean"] > 4 * waiting["median_half_mean"]
    assert "goes with time, not with the length" in view["verdict"]["text"]
    assert "requests waiting in the engine" in view["verdict"]["text"]


def test_slowness_that_goes_with_long_prompts_goes_with_length(tmp_path):
    slow = [
        request(number, late_ms=500, mark_ms=75.5, waiting=number % 2, tokens=3000) for number in range(100, 280, 9)
    ]
    view = view_of(tmp_path, with_slow(slow))
    assert view["goes_with"] == "length"
    assert view["difference"][0]["stage"] == "engine_prefill"
    assert view["verdict"]["cause"] == "long_uncached_prompt"
    assert view["sizes"]["le_4096"]["share"] == pytest.approx(20 / COUNT, abs=0.01)
    assert view["sizes"]["le_4096"]["ttft_ms"]["p50"] > 500 > view["sizes"]["le_256"]["ttft_ms"]["p99"]


def test_slowness_can_go_with_both(tmp_path):
    slow = [request(number, late_ms=500, waiting=20, tokens=3000) for number in range(140, 160)]
    view = view_of(tmp_path, with_slow(slow))
    assert view["goes_with"] == "both"


def test_slowness_that_strikes_at_random_goes_with_neither(tmp_path):
    slow = [request(number, late_ms=300, mark_ms=1.0, waiting=number % 2, tokens=20 + number % 11) for number in SLOW]
    view = view_of(tmp_path, ordinary() + slow)
    assert view["goes_with"] == "neither"
    assert view["difference"][0]["stage"] == "auth"


def test_a_burst_is_seen_without_a_word_from_the_upstream(tmp_path):
    def mute(number: int, at_ns: int, late_ms: float = 0.0) -> Ledger:
        changes = {"timings": None, "usage": Usage()}
        return delayed(80, late_ms + number % 17 / 10, numbered(number, wall_ns=WALL_NS + at_ns, **changes))

    calm = [mute(number, number * SECOND_NS) for number in range(200)]
    burst = [mute(500 + number, 100 * SECOND_NS + number, late_ms=20.0 * number) for number in range(20)]
    view = view_of(tmp_path, calm + burst)
    assert view["goes_with"] == "time"
    assert view["evidence"]["time"]["load"]["is_significant"]
    assert view["evidence"]["length"] == {}
    assert view["verdict"]["cause"] == "slow_upstream"


def test_too_few_requests_say_nothing_about_what_slowness_goes_with(tmp_path):
    view = view_of(tmp_path, [request(number) for number in range(20)])
    assert view["goes_with"] == "unknown"
    assert view["slowest"]["requests"] == 1
    assert view["health"] == []


def test_three_slow_ones_say_nothing_about_what_slowness_goes_with(tmp_path):
    view = view_of(tmp_path, with_slow([request(number, late_ms=500, waiting=20) for number in (7, 70, 170)]))
    assert view["evidence"]["tail"] == 3
    assert view["goes_with"] == "unknown"


@pytest.mark.parametrize(("late_ms", "state"), [(0, "ok"), (250, "watch"), (600, "bad")])
def test_p99_is_held_against_p50(tmp_path, late_ms, state):
    view = view_of(tmp_path, ordinary() + [request(number, late_ms=late_ms) for number in SLOW])
    ttft, tpot = view["health"]
    assert (ttft["rule"], ttft["state"], ttft["limit"]) == ("ttft_p99_by_p50", state, 5.0)
    assert (tpot["rule"], tpot["state"]) == ("tpot_p99_by_p50", "ok")


def test_a_window_has_its_outcomes_and_only_good_requests_have_times(tmp_path):
    made = [request(number) for number in range(40)]
    made[3].outcome = Outcome.UPSTREAM_ERROR
    made[4].outcome = Outcome.CLIENT_CANCELLED
    view = view_of(tmp_path, made)
    assert view["outcomes"] == {"ok": 38, "upstream_error": 1, "client_cancelled": 1}
    assert view["ttft_ms"]["requests"] == 38
    assert view["prompt_tokens"]["p50"] == 31


def test_a_window_is_of_one_model_and_of_its_time(tmp_path):
    made = [request(number) for number in range(40)]
    for one in made[:10]:
        one.model = "other"
    assert view_of(tmp_path, made, model="other")["requests"] == 10
    rows = WindowRows(tmp_path / "traces.sqlite", since_ns=WALL_NS + 30 * SECOND_NS, model=None)
    rows.read()
    assert rows.total == 10


def test_an_empty_window_says_so(tmp_path):
    view = view_of(tmp_path, [], model="m")
    assert view["requests"] == 0
    assert view["goes_with"] == "unknown"
    assert view["verdict"]["cause"] == "unknown"
    assert view["verdict"]["text"] == "No request that ended well began in the last 1h for m."


def test_a_window_of_unknown_cause_leads_to_its_slowest_and_not_to_itself(tmp_path):
    view = view_of(tmp_path, [request(number) for number in range(3)])
    assert (view["verdict"]["cause"], view["verdict"]["action_id"]) == ("unknown", "gather_evidence")
    assert "--window" not in view["verdict"]["action"]
    assert "`tokenline why ID`" in view["verdict"]["action"]


def test_a_window_in_which_nothing_ended_well_says_why_not(tmp_path):
    made = [request(number) for number in range(4)]
    for one in made:
        one.outcome = Outcome.UPSTREAM_ERROR
    view = view_of(tmp_path, made)
    assert (view["ttft_ms"], view["slowest"]["requests"]) == (None, 0)
    assert view["verdict"]["cause"] == "upstream_failure"
    assert view["verdict"]["text"].endswith("None of them ended well: upstream_failure 4.")


def test_a_large_window_is_sampled_and_says_so_but_the_slowest_are_all_read(tmp_path, monkeypatch):
    monkeypatch.setattr(window_rows, "MAX_WHOLE", 50)
    monkeypatch.setattr(window_rows, "MAX_ROWS", 280)
    slow = [request(number, late_ms=500, waiting=20) for number in SLOW]
    view = view_of(tmp_path, ordinary() + slow)
    assert view["sampled"] == {
        "rows_read": 280,
        "rows_read_whole": view["sampled"]["rows_read_whole"],
        "is_complete": False,
    }
    assert 47 <= view["sampled"]["rows_read_whole"] <= 50 + 20
    assert view["ttft_ms"]["requests"] == 280
    assert view["causes"][0] == {"cause": "engine_queue", "requests": 3, "share": 1.0}
    assert view["goes_with"] == "time"
    assert "Only the newest 280 were read." in view["verdict"]["text"]


def test_how_busy_it_was_is_counted_at_each_beginning(tmp_path):
    made = [numbered(number, wall_ns=WALL_NS + round(ms * 1e6)) for number, ms in enumerate((0, 100, 150, 400, 11_000))]
    view_of(tmp_path, made)  # each takes 186 ms
    rows = WindowRows(tmp_path / "traces.sqlite", since_ns=WALL_NS, model=None)
    rows.read()
    assert [(crowd.concurrency, crowd.load) for crowd in rows.crowds().values()] == [
        (1, 1),
        (2, 2),
        (3, 3),
        (1, 4),
        (1, 1),
    ]


def test_a_window_is_told_in_chinese_too(tmp_path):
    view = view_of(tmp_path, ordinary() + [request(number, late_ms=500, waiting=20) for number in SLOW], "zh")
    text = view["verdict"]["text"]
    assert "变慢与时间有关" in text
    assert "engine_queue" in text
    assert window_story(view, "en", "1h") != text


def test_a_third_of_the_slow_ones_is_too_few_for_slowness_to_go_with_it():
    slow, usual_ones = ([Line(first + n, 0, 1.0, 1.0, 1.0, "ok") for n in range(200)] for first in (0, 1000))
    features = {
        name: lambda number, name=name: 100.0 if name == "load" and number % 10 < 3 and number < 1000 else 1.0
        for names in KINDS.values()
        for name in names
    }
    found = correlations(slow, usual_ones, features)
    load = found["time"]["load"]
    assert (load["rank_correlation"], load["is_significant"]) == (0.3, False)
    assert load["slowest_mean"] > 30 * load["median_half_mean"]
    assert goes_with(found) == "neither"


VALUES = st.lists(st.integers(0, 9).map(float), min_size=1, max_size=30)


@given(VALUES, VALUES)
def test_the_rank_correlation_is_the_share_of_pairs_won_less_those_lost(group, others):
    won = sum((one > other) - (one < other) for one in group for other in others)
    assert rank_correlation(group, others) == pytest.approx(won / len(group) / len(others))


def test_small_groups_need_a_larger_correlation_to_be_believed():
    assert chance_correlation(3, 10) > 1
    assert chance_correlation(20, 150) < 0.5


def test_a_quantile_is_a_value_that_was_seen():
    assert [quantile([1.0, 2.0, 3.0, 4.0], share) for share in (0, 0.25, 0.5, 0.51, 1)] == [1, 1, 2, 3, 4]
