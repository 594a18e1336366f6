"""The gateway's metrics: each sample once, in the right series, with bounded labels."""

from __future__ import annotations

from typing import Any

import pytest
from ledgers import ELSEWHERE, HERE, STREAM_STAGES_MS, attempt, ledger, numbered, timings, whole
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.exposition import generate_latest

from protocol.timings import HostIdentity
from settings.schema import SloSettings
from tracing.clock import FakeClock
from tracing.ledger import FirstToken, Ledger, Outcome, Usage, WorkerState
from tracing.observer.keep import KeepRule
from tracing.observer.meters import MAX_ROUTES, Meters
from tracing.observer.rows import Row
from tracing.observer.workers import SILENCE_NS, Workers
from tracing.stages import timeline_of

TTFT = "gen_ai_server_time_to_first_token_seconds"
TPOT = "gen_ai_server_time_per_output_token_seconds"
DURATION = "gen_ai_server_request_duration_seconds"
STAGE = "tokenline_stage_duration_seconds"
ROUTE = {"model": "m", "upstream": "engine", "surface": "chat"}


class Rig:
    """Meters and a way to read them."""

    def __init__(self, share: float = 1.0) -> None:
        self.registry = CollectorRegistry()
        self.keep = KeepRule({"default": SloSettings(ttft_ms=1000, tpot_ms=100)}, share)
        self.meters = Meters(self.registry, trace_is_kept=self.keep.keeps_for_sure)

    def close(self, made: Ledger, host: HostIdentity = HERE) -> Row:
        timeline = timeline_of(made, host)
        row = Row(made, timeline, host, self.keep.keeps(made, timeline))
        self.meters.closed(row)
        self.meters.stages(row)
        return row

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)

    def series(self, name: str) -> dict[tuple[str, ...], float]:
        return {
            tuple(sample.labels.values()): sample.value
            for family in self.registry.collect()
            for sample in family.samples
            if sample.name == name
        }

    def page(self) -> str:
        return generate_latest(self.registry).decode()


def first_token(made: Ledger, **changes: Any) -> FirstToken:
    ttft_ns = made.first_token_written - made.ingress
    fields: dict[str, Any] = {
        "request_id": made.request_id,
        "worker": 0,
        "model": made.model,
        "upstream": made.upstream,
        "surface": made.surface,
        "ttft_ns": ttft_ns,
        "trace_id": made.trace_id,
    }
    return FirstToken(**(fields | changes))


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


KEEP: list[tuple[str, dict[str, Any], bool]] = [
    ("an ordinary request", {}, False),
    ("an upstream's error", {"outcome": Outcome.UPSTREAM_ERROR}, True),
    ("a cancellation", {"outcome": Outcome.CLIENT_CANCELLED}, True),
    ("a client's error", {"outcome": Outcome.CLIENT_ERROR}, True),
    ("a stranger's key", {"outcome": Outcome.AUTH_ERROR}, False),
    ("a slow first token", {"first_token_written": 1001.0}, True),
    ("a first token within the objective", {"first_token_written": 999.0}, False),
    ("slow tokens", {"last_token": 6000.0}, True),
    (
        "a stream that waited for nothing",
        {"first_token": None, "first_token_written": None, "finish": 1001.0},
        True,
    ),
]


@pytest.mark.parametrize(("changes", "kept"), [case[1:] for case in KEEP], ids=[case[0] for case in KEEP])
def test_kept_beside_the_share(changes: dict[str, Any], kept: bool) -> None:
    made = ledger(**changes)
    rule = KeepRule({"default": SloSettings(ttft_ms=1000, tpot_ms=100)}, 0.0)
    assert rule.keeps(made, timeline_of(made, HERE)) is kept


def test_objectives_are_per_model() -> None:
    made = ledger(first_token_written=500.0)
    rule = KeepRule({"default": SloSettings(), "m": SloSettings(ttft_ms=400)}, 0.0)
    assert rule.keeps(made, timeline_of(made, HERE))


def test_the_share_is_a_share_and_the_same_for_the_same_trace() -> None:
    rule = KeepRule({}, 0.25)
    kept = [trace for number in range(4000) if rule.in_share(trace := f"{number:032x}")]
    assert 900 < len(kept) < 1100
    assert all(rule.in_share(trace) for trace in kept)
    assert KeepRule({}, 1.0).in_share("f" * 32)
    assert not KeepRule({}, 0.0).in_share("0" * 32)


class WorkersRig:
    """Workers on a clock of the test."""

    def __init__(self) -> None:
        self.rig = Rig()
        self.clock = FakeClock()
        self.workers = Workers(
            self.clock,
            self.rig.meters.gauges["tokenline_inflight_requests"],
            max_upstreams=4,
            dropped=self.rig.meters.ledgers_dropped,
        )

    def report(self, pid: int, dropped: int = 0, **inflight: int) -> None:
        self.workers.report(WorkerState(pid % 10, pid, HERE, inflight, dropped))

    def inflight(self) -> dict[str, float]:
        return {labels[0]: value for labels, value in self.rig.series("tokenline_inflight_requests").items()}

    def dropped(self) -> float | None:
        return self.rig.value("tokenline_ledgers_dropped_total")


def test_inflight_is_the_sum_over_workers_and_falls_to_zero() -> None:
    rig = WorkersRig()
    rig.report(11, engine=3)
    rig.report(12, engine=2, other=1)
    assert rig.inflight() == {"engine": 5, "other": 1}
    rig.report(12)
    assert rig.inflight() == {"engine": 3, "other": 0}


def test_a_worker_that_fell_silent_is_no_longer_counted() -> None:
    rig = WorkersRig()
    rig.report(11, engine=3)
    rig.clock.advance_ms(SILENCE_NS / 1e6 - 1)
    rig.report(12, engine=2)
    assert rig.inflight() == {"engine": 5}
    rig.clock.advance_ms(2)
    rig.workers.publish()
    assert rig.inflight() == {"engine": 2}
    assert [state.pid for state in rig.workers.live()] == [12]


def test_what_workers_lost_only_ever_adds_up() -> None:
    rig = WorkersRig()
    rig.report(11, dropped=5)
    rig.report(12, dropped=1)
    rig.report(11, dropped=7)
    rig.report(11, dropped=7)
    assert rig.dropped() == 8
    rig.report(11, dropped=2)  # the same pid from a new process
    assert rig.dropped() == 10
    rig.clock.advance_ms(60_000)
    rig.report(12, dropped=1)
    assert rig.dropped() == 10


def test_upstream_names_of_workers_are_bounded() -> None:
    rig = WorkersRig()
    rig.report(11, **{f"u{number}": 1 for number in range(6)})
    assert rig.inflight() == {"u0": 1, "u1": 1, "u2": 1, "u3": 1, "other": 2}


def test_a_ledgers_clock_is_its_workers() -> None:
    rig = WorkersRig()
    rig.workers.report(WorkerState(3, 13, ELSEWHERE, {}, 0))
    assert rig.workers.host_of(3, HERE) == ELSEWHERE
    assert rig.workers.host_of(4, HERE) == HERE
