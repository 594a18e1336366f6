"""The gateway's metrics: each sample once, in the right series, with bounded labels."""

from __future__ import annotations

from typing import Any

import pytest
from ledgers import ELSEWHERE, STREAM_STAGES_MS, attempt, ledger, numbered, timings, whole
from meters_rig import Rig, first_token

from tracing import semconv
from tracing.ledger import Outcome, Usage
from tracing.observer.meters import MAX_ROUTES
from tracing.spans import Span

TTFT = "gen_ai_server_time_to_first_token_seconds"
TPOT = "gen_ai_server_time_per_output_token_seconds"
DURATION = "gen_ai_server_request_duration_seconds"
STAGE = "tokenline_stage_duration_seconds"
ROUTE = {"model": "m", "upstream": "engine", "surface": "chat"}


def test_ttft_is_observed_at_the_first_token_and_not_again_at_the_end() -> None:
    rig = Rig()
    rig.meters.first_token(first_token(ledger()))
    assert rig.value(TTFT + "_count", **ROUTE) == 1
    assert rig.value(TTFT + "_sum", **ROUTE) == pytest.approx(0.0815)
    rig.close(ledger())
    assert rig.value(TTFT + "_count", **ROUTE) == 1


def test_ttft_whose_first_record_went_to_an_earlier_observer_is_observed_at_the_end() -> None:
    rig = Rig()
    rig.close(ledger())
    assert rig.value(TTFT + "_count", **ROUTE) == 1


def test_whole_answers_and_streams_without_a_first_token_have_no_ttft_sample() -> None:
    rig = Rig()
    rig.close(whole())
    rig.close(ledger(first_token=None, first_token_written=None, timings=None))
    assert rig.value(TTFT + "_count", **ROUTE) is None
    assert rig.value(DURATION + "_count", **ROUTE) == 2


def test_duration_tpot_and_tokens_of_a_good_stream() -> None:
    rig = Rig()
    rig.close(ledger(team="blue", usage=Usage(31, 51, 16, 0, "usage")))
    assert rig.value(DURATION + "_sum", **ROUTE) == pytest.approx(0.186)
    assert rig.value(TPOT + "_sum", **ROUTE, count="usage") == pytest.approx(0.002)
    assert rig.series("tokenline_tokens_total") == {
        ("input", "m", "blue"): 31,
        ("cached", "m", "blue"): 16,
        ("output", "m", "blue"): 51,
    }
    assert rig.value("tokenline_prompt_tokens_sum", model="m") == 31
    assert rig.value("tokenline_output_tokens_sum", model="m") == 51
    assert rig.value("tokenline_ttft_by_prompt_size_seconds_count", model="m", size="le_256") == 1
    assert rig.value("tokenline_requests_total", **ROUTE, outcome="ok", status="200") == 1
    assert rig.value("tokenline_gateway_overhead_seconds_count", upstream="engine") == 1


def test_counted_events_label_tpot_and_are_not_called_tokens() -> None:
    rig = Rig()
    rig.close(ledger(usage=Usage(output_tokens=11, source="events")))
    assert rig.value(TPOT + "_count", **ROUTE, count="events") == 1
    assert rig.series("tokenline_tokens_total") == {}
    assert rig.value("tokenline_output_tokens_count", model="m") is None


def test_several_choices_are_skipped_by_tpot_and_counted() -> None:
    rig = Rig()
    rig.close(ledger(choices=3))
    assert rig.series(TPOT + "_count") == {}
    assert rig.value("tokenline_tpot_skipped_total", reason="choices") == 1


def test_every_stage_of_a_stream_is_observed_once() -> None:
    rig = Rig()
    rig.close(ledger())
    found = {labels[0]: value for labels, value in rig.series(STAGE + "_sum").items()}
    expected = STREAM_STAGES_MS | {"streaming": 103.5, "closing": 1.0, "engine_decode": 100.0}
    assert found == pytest.approx({name: ms / 1e3 for name, ms in expected.items()})
    assert set(rig.series(STAGE + "_count").values()) == {1}
    assert rig.value("tokenline_ttft_unaccounted_seconds_count", upstream="engine") == 1


def test_unaccounted_is_an_absolute_value_and_only_of_engines_on_our_clock() -> None:
    rig = Rig()
    rig.close(ledger(attempts=[attempt(connect_start=5.0)]))
    assert rig.value("tokenline_ttft_unaccounted_seconds_sum", upstream="engine") == pytest.approx(0.001)
    rig.close(ledger(timings=timings(ELSEWHERE)))
    rig.close(ledger(timings=None))
    rig.close(whole())
    assert rig.value("tokenline_ttft_unaccounted_seconds_count", upstream="engine") == 1


def test_a_negative_stage_is_counted_and_observed_as_it_is() -> None:
    rig = Rig()
    rig.close(ledger(timings=timings(received=8.0)))
    assert rig.value("tokenline_timing_anomalies_total", kind="transit_out") == 1
    assert rig.value(STAGE + "_sum", stage="transit_out", upstream="engine") == pytest.approx(-0.001)


@pytest.mark.parametrize(
    ("outcome", "code", "reason"),
    [
        (Outcome.QUEUE_REJECTED, "queue_full", "queue_full"),
        (Outcome.RATE_LIMITED, "rate_limit_exceeded", "rate_limit"),
        (Outcome.RATE_LIMITED, "budget_exceeded", "budget"),
        (Outcome.RATE_LIMITED, "something new", "rate_limited"),
    ],
)
def test_refusals_are_counted_by_reason(outcome: Outcome, code: str, reason: str) -> None:
    rig = Rig()
    rig.close(ledger(outcome=outcome, error_code=code, status=429, attempts=[], timings=None))
    assert rig.series("tokenline_rejections_total") == {(reason,): 1}


def test_attempts_are_counted_by_result() -> None:
    rig = Rig()
    tries = [attempt(1, upstream="a", error="connect"), attempt(2, upstream="a", status=503), attempt(3, error="weird")]
    rig.close(ledger(attempts=[*tries, attempt(4, upstream="b")]))
    assert rig.series("tokenline_attempts_total") == {
        ("a", "connect"): 1,
        ("a", "status"): 1,
        ("engine", "other"): 1,
        ("b", "ok"): 1,
    }


def test_later_combinations_take_other_and_the_first_keep_their_names() -> None:
    rig = Rig()
    for number in range(MAX_ROUTES + 20):
        rig.close(numbered(number, model=f"model-{number}"))
    found = rig.series("tokenline_requests_total")
    assert len(found) == MAX_ROUTES + 1
    assert found["other", "other", "other", "ok", "200"] == 20
    rig.close(numbered(5000, model="model-0"))
    assert rig.value("tokenline_requests_total", **(ROUTE | {"model": "model-0"}), outcome="ok", status="200") == 2
    assert len(rig.series("tokenline_prompt_tokens_count")) <= MAX_ROUTES + 1


def test_a_nonsense_status_does_not_make_a_series_of_its_own() -> None:
    rig = Rig()
    for status in (0, 99, 700, 12345):
        rig.close(ledger(status=status))
    assert {labels[-1] for labels in rig.series("tokenline_requests_total")} == {"none", "other"}


def test_exemplars_name_kept_traces_on_ttft_tpot_and_duration_alone() -> None:
    rig = Rig(share=1.0)
    rig.meters.first_token(first_token(ledger()))
    rig.close(ledger())
    lines = [line for line in rig.page().splitlines() if f'# {{trace_id="{ledger().trace_id}"}}' in line]
    assert sorted({line.partition("_bucket")[0] for line in lines}) == sorted([TTFT, TPOT, DURATION])
    assert len(lines) == 3


def test_traces_that_are_not_kept_have_no_exemplar() -> None:
    rig = Rig(share=0.0)
    rig.meters.first_token(first_token(ledger()))
    rig.close(ledger())
    assert "trace_id=" not in rig.page()
    assert rig.value("tokenline_traces_kept_total") == 0


def test_a_slow_first_token_has_its_exemplar_at_once_whatever_the_share() -> None:
    rig = Rig(share=0.0)
    rig.meters.first_token(first_token(ledger(), ttft_ns=1_500_000_000))
    assert f'trace_id="{ledger().trace_id}"' in rig.page()


def test_a_first_token_without_a_trace_id_has_no_exemplar() -> None:
    rig = Rig()
    rig.meters.first_token(first_token(ledger(), trace_id=""))
    assert "trace_id=" not in rig.page()
    assert rig.value(TTFT + "_count", **ROUTE) == 1


def test_the_clients_side_of_a_stream_is_observed_and_what_is_unknown_is_not() -> None:
    rig = Rig()
    rig.close(ledger(client_rtt_ns=20_000_000, backpressure_ns=300_000_000))
    rig.close(ledger())
    rig.close(whole(backpressure_ns=5))
    assert rig.value("tokenline_client_rtt_seconds_count") == 1
    assert rig.value("tokenline_client_rtt_seconds_sum") == pytest.approx(0.02)
    assert rig.value("tokenline_client_backpressure_seconds_count") == 2
    assert rig.value("tokenline_client_backpressure_seconds_sum") == pytest.approx(0.3)
    assert rig.value(STAGE + "_sum", stage="client_backpressure", upstream="engine") == pytest.approx(0.3)


def engine_span(**attributes: Any) -> Span:
    return Span("1" * 32, "2" * 16, "llm_request", 1, 2, attributes=attributes)


ABORTED = {semconv.ABORT_SECONDS: 0.004, semconv.WASTED_TOKENS: 3}
LEFT = {"outcome": Outcome.CLIENT_CANCELLED, "client_gone": 180.0}
ABORTS: list[tuple[str, dict[str, Any], list[Span], float | None, float | None]] = [
    ("the engine says when it was free", LEFT, [engine_span(**ABORTED)], 0.009, 3),
    ("it does not say", LEFT, [engine_span()], 0.005, None),
    ("no span came", LEFT, [], 0.005, None),
    ("nothing was sent yet", LEFT | {"attempts": [attempt(request_sent=None)]}, [], None, None),
    ("the upstream had ended before", LEFT | {"client_gone": 190.0}, [], None, None),
    ("no attempt", LEFT | {"attempts": []}, [], None, None),
    ("it timed out and nobody left", {"outcome": Outcome.UPSTREAM_TIMEOUT}, [engine_span(**ABORTED)], None, 3),
    ("a good request", {}, [engine_span()], None, None),
    ("nonsense", LEFT, [engine_span(**{semconv.ABORT_SECONDS: "x", semconv.WASTED_TOKENS: -4})], 0.005, None),
]


@pytest.mark.parametrize(
    ("changes", "spans", "seconds", "wasted"), [case[1:] for case in ABORTS], ids=[case[0] for case in ABORTS]
)
def test_how_soon_work_stops_for_a_client_that_left(
    changes: dict[str, Any], spans: list[Span], seconds: float | None, wasted: float | None
) -> None:
    rig = Rig()
    rig.meters.left_early(ledger(**changes), spans)
    found = rig.value("tokenline_abort_propagation_seconds_sum", upstream="engine")
    assert found == (None if seconds is None else pytest.approx(seconds))
    assert rig.value("tokenline_wasted_tokens_total", upstream="engine") == wasted


def test_what_alerts_are_judged_by_begins_at_zero_so_that_the_first_bad_request_counts() -> None:
    rig = Rig()
    rig.meters.expect(["m", "m"])
    zeros = {("m", slo, result): 0 for slo in ("ttft", "tpot") for result in ("good", "bad")}
    both = {("n", "ttft", "good"): 1, ("n", "ttft", "bad"): 0}

    def counted() -> dict[tuple[str, ...], float]:
        return {
            (labels["model"], labels["slo"], labels["result"]): sample.value
            for family in rig.registry.collect()
            for sample in family.samples
            if sample.name == "tokenline_slo_requests_total" and (labels := sample.labels)
        }

    assert counted() == zeros
    rig.meters.slo("n", "ttft", True)
    assert counted() == zeros | both
    rig.meters.expect([f"m{number}" for number in range(MAX_ROUTES + 1)])  # more than have series: none is begun
    assert counted() == zeros | both


def test_slo_and_bands_have_counters_with_bounded_models() -> None:
    rig = Rig()
    for number in range(MAX_ROUTES + 5):
        rig.meters.slo(f"m{number}", "ttft", number > 0)
    assert rig.value("tokenline_slo_requests_total", model="m0", slo="ttft", result="bad") == 1
    assert rig.value("tokenline_slo_requests_total", model="m1", slo="ttft", result="good") == 1
    assert rig.value("tokenline_slo_requests_total", model="other", slo="ttft", result="good") == 5
    rig.meters.band_request("m", "p99+")
    rig.meters.band_seconds("m", "p99+", "engine_queue", 0.5)
    assert rig.value("tokenline_band_requests_total", model="m", band="p99+") == 1
    assert rig.value("tokenline_band_stage_seconds_total", model="m", band="p99+", stage="engine_queue") == 0.5
