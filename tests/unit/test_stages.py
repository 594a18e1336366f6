"""The arithmetic of the timeline, on a timetable that is known to the microsecond."""

from __future__ import annotations

from typing import Any

import pytest
from ledgers import (
    ATTEMPT_MS,
    ELSEWHERE,
    HERE,
    STREAM_STAGES_MS,
    attempt,
    ledger,
    timings,
    whole,
)

from protocol.timings import HostIdentity, Timings
from tracing.ledger import Ledger, Outcome, Usage
from tracing.stages import DESCRIPTIONS, STAGES, Timeline, timeline_of


def ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 6)


def stages_ms(timeline: Timeline) -> dict[str, float | None]:
    return {name: ms(value) for name, value in timeline.stages.items()}


def closes(timeline: Timeline) -> bool:
    assert timeline.total is not None
    return abs(sum(timeline.stages.values()) + (timeline.unaccounted or 0) - timeline.total) < 1e-9


def test_every_interval_of_a_stream_is_measured_on_its_own_and_they_sum_to_ttft() -> None:
    timeline = timeline_of(ledger(), HERE)
    assert stages_ms(timeline) == STREAM_STAGES_MS
    assert ms(timeline.ttft) == 81.5 == sum(STREAM_STAGES_MS.values())
    assert timeline.total == timeline.ttft
    assert abs(timeline.unaccounted or 0) < 1e-9
    assert timeline.placement == "exact"
    assert timeline.anomalies == ()


INTERVALS = [
    # stage, mark that ends it, where the mark is
    ("auth", "authenticated", "ledger"),
    ("receive", "body_read", "ledger"),
    ("route", "routed", "ledger"),
    ("gateway_queue", "admitted", "ledger"),
    ("connect", "connected", "attempt"),
    ("send", "request_sent", "attempt"),
    ("transit_out", "received", "engine"),
    ("engine_tokenize", "queued", "engine"),
    ("engine_queue", "scheduled", "engine"),
    ("engine_prefill", "prefill_end", "engine"),
    ("engine_emit", "first_written", "engine"),
    ("transit_back", "first_token", "ledger"),
    ("relay", "first_token_written", "ledger"),
]


@pytest.mark.parametrize(("stage", "mark", "where"), INTERVALS)
def test_a_mark_moved_by_a_quarter_ms_lengthens_the_stage_that_it_ends(stage: str, mark: str, where: str) -> None:
    from ledgers import ENGINE_MS, LEDGER_MS

    moved = {"ledger": LEDGER_MS, "attempt": ATTEMPT_MS, "engine": ENGINE_MS}[where][mark] + 0.25
    change: dict[str, Any] = {mark: moved}
    if where == "ledger":
        made = ledger(**change)
    elif where == "attempt":
        made = ledger(attempts=[attempt(**change)])
    else:
        made = ledger(timings=timings(**change))
    found = stages_ms(timeline_of(made, HERE))
    assert found[stage] == STREAM_STAGES_MS[stage] + 0.25
    others = {name for name in found if found[name] != STREAM_STAGES_MS[name]} - {stage}
    assert len(others) <= 1, "only the stage that begins at the mark may change with it"
    assert all(found[name] == STREAM_STAGES_MS[name] - 0.25 for name in others)


def test_time_that_no_stage_explains_is_unaccounted() -> None:
    timeline = timeline_of(ledger(attempts=[attempt(connect_start=7.25, connected=8.5)]), HERE)
    assert ms(timeline.unaccounted) == 1.25
    assert closes(timeline)


def test_after_the_first_token_streaming_and_closing_sum_to_e2e_less_ttft() -> None:
    timeline = timeline_of(ledger(timings=timings(preempted_ms=7.0)), HERE)
    assert {name: ms(value) for name, value in timeline.after.items()} == {
        "streaming": 103.5,
        "closing": 1.0,
        "engine_decode": 100.0,
        "preempted": 7.0,
    }
    assert timeline.e2e is not None
    assert timeline.ttft is not None
    assert ms(timeline.e2e - timeline.ttft) == 104.5


def test_a_whole_answer_has_no_ttft_and_its_stages_sum_to_e2e_with_decode_and_closing() -> None:
    timeline = timeline_of(whole(), HERE)
    assert timeline.ttft is None
    assert timeline.tpot is None
    assert ms(timeline.total) == ms(timeline.e2e) == 186.0
    found = stages_ms(timeline)
    assert found["engine_prefill"] == 45.0
    assert found["engine_decode"] == 100.0
    assert found["engine_emit"] == 2.5
    assert found["transit_back"] == 7.0
    assert found["closing"] == 1.0
    assert "relay" not in found
    assert timeline.after == {}
    assert ms(timeline.engine_ttft) == 65.0
    assert ms(timeline.unaccounted) == 0.0


def test_a_retry_gives_its_time_to_failed_attempts_and_has_clocks_of_its_own() -> None:
    failed = attempt(1, upstream="dead", connected=None, request_sent=None, end=2.0, error="connect")
    failed.connect_start = attempt(connect_start=1.75).connect_start
    made = ledger(authenticated=0.5, body_read=1.0, routed=1.25, admitted=1.75, attempts=[failed, attempt(2)])
    timeline = timeline_of(made, HERE)
    found = stages_ms(timeline)
    assert found["failed_attempts"] == 4.25
    assert found["connect"] == 2.5
    assert found["transit_out"] == 1.5
    assert ms(timeline.ttft) == 81.5
    assert ms(timeline.unaccounted) == 0.0


def test_a_pooled_connection_takes_no_time_to_connect() -> None:
    timeline = timeline_of(ledger(attempts=[attempt(connect_start=8.5, connected=8.5, reused=True)]), HERE)
    assert stages_ms(timeline)["connect"] == 0.0


def test_an_engine_on_another_host_has_durations_and_one_residual_transit_and_no_closure() -> None:
    timeline = timeline_of(ledger(timings=timings(ELSEWHERE)), HERE)
    found = stages_ms(timeline)
    assert found["engine_tokenize"] == 2.0
    assert found["engine_queue"] == 18.0
    assert found["engine_prefill"] == 45.0
    assert found["transit"] == 71.0 - 65.0
    assert not {"transit_out", "transit_back", "engine_emit", "engine_decode"} & set(found)
    assert timeline.placement == "durations"
    assert timeline.unaccounted is None
    assert ms(timeline.engine_ttft) == 65.0


@pytest.mark.parametrize(
    "other",
    [HostIdentity("host", "another boot"), HostIdentity("host", "boot", "another time namespace")],
)
def test_marks_of_another_boot_or_time_namespace_are_never_subtracted(other: HostIdentity) -> None:
    assert timeline_of(ledger(timings=timings(other)), HERE).placement == "durations"


def test_another_hosts_whole_answer_counts_decode_and_leaves_the_rest_to_transit() -> None:
    timeline = timeline_of(whole(timings=timings(ELSEWHERE)), HERE)
    found = stages_ms(timeline)
    assert found["engine_decode"] == 100.0
    assert found["transit"] == 176.0 - 165.0
    assert found["closing"] == 1.0


def test_a_residual_transit_that_comes_out_negative_is_shown_and_named() -> None:
    timeline = timeline_of(ledger(timings=timings(ELSEWHERE, prompt_ms=60.0)), HERE)
    assert stages_ms(timeline)["transit"] == -9.0
    assert timeline.anomalies == ("transit",)


def test_an_upstream_that_reports_nothing_is_one_stage() -> None:
    timeline = timeline_of(ledger(timings=None), HERE)
    found = stages_ms(timeline)
    assert found["upstream_wait"] == 71.0
    assert not [name for name in found if name.startswith(("engine_", "transit"))]
    assert timeline.placement is None
    assert timeline.engine_ttft is None
    assert ms(timeline.unaccounted) == 0.0


def test_llama_cpps_timings_without_marks_are_durations() -> None:
    timeline = timeline_of(ledger(timings=Timings(prompt_ms=40.0, predicted_ms=90.0)), HERE)
    found = stages_ms(timeline)
    assert found["engine_prefill"] == 40.0
    assert found["transit"] == 31.0
    assert timeline.placement == "durations"
    assert timeline.engine_ttft is None, "its tokenising and queueing are unknown"


def test_timings_that_say_nothing_of_prefill_leave_one_wait() -> None:
    assert "upstream_wait" in timeline_of(ledger(timings=Timings(predicted_n=4)), HERE).stages


def test_a_stream_without_a_first_token_has_no_ttft_and_sums_to_its_end() -> None:
    cut = ledger(
        first_event=None, first_token=None, first_visible=None, first_token_written=None, last_token=None, timings=None
    )
    timeline = timeline_of(cut, HERE)
    assert timeline.ttft is None
    assert timeline.tpot is None
    assert timeline.after == {}
    found = stages_ms(timeline)
    assert found["upstream_wait"] == 176.0
    assert found["closing"] == 1.0
    assert ms(timeline.total) == 186.0
    assert ms(timeline.unaccounted) == 0.0


def test_a_client_that_leaves_before_the_first_token_is_written_gets_no_ttft() -> None:
    partial = timings(last_token=None, predicted_ms=None)
    timeline = timeline_of(
        ledger(first_token_written=None, timings=partial, outcome=Outcome.CLIENT_CANCELLED, client_gone=80.5), HERE
    )
    assert timeline.ttft is None
    found = stages_ms(timeline)
    assert found["engine_prefill"] == 45.0
    assert found["engine_emit"] == 1.5
    assert closes(timeline)
    assert timeline.anomalies == ()


def test_a_stream_whose_event_was_written_before_its_last_token_has_no_negative_emission() -> None:
    timeline = timeline_of(ledger(first_token_written=None), HERE)
    found = stages_ms(timeline)
    assert found["engine_decode"] == 100.0
    assert "engine_emit" not in found
    assert "transit_back" not in found
    assert ms(timeline.unaccounted) == 9.5, "what was not measured is not guessed"
    assert timeline.anomalies == ()


def test_a_connection_that_fails_gives_its_time_to_connect() -> None:
    dead = attempt(
        connected=None, request_sent=None, upstream_headers=None, upstream_first_byte=None, end=5006.0, error="connect"
    )
    marks = dict.fromkeys(
        ("first_event", "first_token", "first_visible", "first_token_written", "last_token", "upstream_end")
    )
    timeline = timeline_of(
        ledger(attempts=[dead], timings=None, outcome=Outcome.UPSTREAM_ERROR, status=502, finish=5007.0, **marks), HERE
    )
    assert stages_ms(timeline)["connect"] == 5000.0
    assert stages_ms(timeline)["closing"] == 1.0
    assert ms(timeline.unaccounted) == 0.0


def test_an_upstream_that_never_answers_is_a_wait_to_the_end_of_the_attempt() -> None:
    frozen = attempt(upstream_headers=None, upstream_first_byte=None, end=309.0, error="first_byte")
    marks = dict.fromkeys(
        ("first_event", "first_token", "first_visible", "first_token_written", "last_token", "upstream_end")
    )
    timeline = timeline_of(
        ledger(attempts=[frozen], timings=None, outcome=Outcome.UPSTREAM_TIMEOUT, finish=310.0, **marks), HERE
    )
    assert stages_ms(timeline)["upstream_wait"] == 300.0
    assert closes(timeline)


def test_a_request_refused_before_any_attempt_has_no_upstream_stage_and_no_overhead() -> None:
    marks = dict.fromkeys(
        (
            "body_read",
            "routed",
            "admitted",
            "first_event",
            "first_token",
            "first_visible",
            "first_token_written",
            "last_token",
            "upstream_end",
        )
    )
    timeline = timeline_of(ledger(attempts=[], timings=None, authenticated=None, finish=1.5, **marks), HERE)
    assert timeline.stages == {}
    assert ms(timeline.e2e) == 1.5
    assert timeline.overhead is None


def test_a_negative_interval_is_shown_as_it_is_and_named() -> None:
    timeline = timeline_of(ledger(timings=timings(received=8.75)), HERE)
    assert stages_ms(timeline)["transit_out"] == -0.25
    assert timeline.anomalies == ("transit_out",)
    assert ms(timeline.unaccounted) == 0.0


def test_stages_that_overlap_make_unaccounted_negative_and_named() -> None:
    timeline = timeline_of(ledger(attempts=[attempt(connect_start=5.0)]), HERE)
    assert ms(timeline.unaccounted) == -1.0
    assert timeline.anomalies == ("unaccounted",)


def test_an_upstream_that_ends_before_the_first_token_was_written_is_an_anomaly_of_streaming() -> None:
    timeline = timeline_of(ledger(upstream_end=81.25, finish=186.0), HERE)
    assert "streaming" in timeline.anomalies


TPOT: list[tuple[str, dict[str, Any], float | None, str | None]] = [
    ("last less first over tokens less one", {}, 2.0, "usage"),
    ("several tokens in one event change nothing", {"token_events": 12}, 2.0, "usage"),
    ("without usage the events are counted", {"usage": Usage(), "token_events": 11}, 10.0, "events"),
    ("counted events may come as usage", {"usage": Usage(output_tokens=11, source="events")}, 10.0, "events"),
    ("one token has no gap", {"usage": Usage(output_tokens=1, source="usage")}, None, None),
    ("no token has no gap", {"usage": Usage(output_tokens=0, source="usage")}, None, None),
    ("one event has no gap", {"usage": Usage(), "token_events": 1}, None, None),
    ("several choices are skipped", {"choices": 2}, None, None),
    ("no first token, no sample", {"first_token": None, "first_token_written": None}, None, None),
    (
        "reasoning that was not streamed is not counted",
        {"usage": Usage(output_tokens=51, reasoning_tokens=25, source="usage")},
        4.0,
        "usage",
    ),
    (
        "reasoning that was streamed is counted",
        {"usage": Usage(output_tokens=51, reasoning_tokens=25, source="usage"), "first_visible": 130.0},
        2.0,
        "usage",
    ),
]


@pytest.mark.parametrize(("changes", "tpot_ms", "count"), [case[1:] for case in TPOT], ids=[case[0] for case in TPOT])
def test_tpot(changes: dict[str, Any], tpot_ms: float | None, count: str | None) -> None:
    timeline = timeline_of(ledger(**changes), HERE)
    assert (ms(timeline.tpot), timeline.tpot_count) == (tpot_ms, count)


def test_every_stage_that_can_appear_has_a_place_and_a_description() -> None:
    cases: list[Ledger] = [
        ledger(),
        whole(),
        ledger(timings=None),
        ledger(timings=timings(ELSEWHERE)),
        ledger(attempts=[attempt(1), attempt(2)]),
    ]
    for case in cases:
        timeline = timeline_of(case, HERE)
        assert set(timeline.stages) <= set(STAGES)
        assert set(timeline.stages) | {"streaming", "closing", "unaccounted"} <= set(DESCRIPTIONS)


NEVER_ANSWERED = {
    "first_event": None,
    "first_token": None,
    "first_visible": None,
    "first_token_written": None,
    "last_token": None,
    "upstream_end": None,
}


@pytest.mark.parametrize(
    ("given_up_ms", "stage", "length_ms"),
    [
        (10.0, "transit_out", 1.0),
        (11.5, "engine_tokenize", 1.0),
        (20.0, "engine_queue", 7.5),
        (50.0, "engine_prefill", 19.5),
    ],
)
def test_a_request_given_up_before_its_answer_ends_in_the_stage_that_it_was_in(
    given_up_ms: float, stage: str, length_ms: float
) -> None:
    """The engine's own account, which came with its span, goes on beyond what the gateway waited for."""
    given_up = ledger(
        **NEVER_ANSWERED,
        attempts=[attempt(end=given_up_ms, upstream_headers=None, upstream_first_byte=None)],
        finish=given_up_ms + 0.5,
        outcome=Outcome.UPSTREAM_TIMEOUT,
    )
    timeline = timeline_of(given_up, HERE)
    found = stages_ms(timeline)
    assert list(found)[-2:] == [stage, "closing"]
    assert found[stage] == length_ms
    assert ms(timeline.total) == given_up_ms + 0.5
    assert closes(timeline)
    assert abs(timeline.unaccounted or 0) < 1e-9
    assert timeline.anomalies == ()


def test_another_hosts_engine_that_went_on_longer_than_was_waited_leaves_one_wait() -> None:
    given_up = ledger(
        **NEVER_ANSWERED,
        attempts=[attempt(end=40.0)],
        finish=40.5,
        timings=timings(ELSEWHERE),
        outcome=Outcome.UPSTREAM_TIMEOUT,
    )
    timeline = timeline_of(given_up, HERE)
    assert stages_ms(timeline)["upstream_wait"] == 31.0
    assert "transit" not in timeline.stages
    assert timeline.anomalies == ()
