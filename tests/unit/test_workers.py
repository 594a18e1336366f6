"""What is known of the relay workers: the living, the waiting, the lost."""

from __future__ import annotations

import pytest
from ledgers import ELSEWHERE, HERE
from meters_rig import Rig

from tracing.clock import FakeClock
from tracing.ledger import WorkerState
from tracing.observer.waiting import Waiting
from tracing.observer.workers import SILENCE_NS, Workers


class WorkersRig:
    """Workers on a clock of the test."""

    def __init__(self) -> None:
        self.rig = Rig()
        self.clock = FakeClock()
        self.workers = Workers(
            self.clock,
            self.rig.meters.gauges,
            max_names=4,
            dropped=self.rig.meters.ledgers_dropped,
            lagged=self.rig.meters.loop_lags,
            waiting=Waiting(),
        )

    def report(self, pid: int, dropped: int = 0, **inflight: int) -> None:
        self.workers.report(WorkerState(pid % 10, pid, HERE, inflight, dropped))

    def waits(self, pid: int, depth: int, **since_ms: float) -> None:
        """A worker with a queue, and for each model the age in ms of its oldest waiting request."""
        waiting = {model: self.clock.mono_ns() - round(ms * 1e6) for model, ms in since_ms.items()}
        self.workers.report(WorkerState(pid % 10, pid, HERE, {}, 0, queue_depth=depth, waiting=waiting))

    def oldest(self) -> dict[str, float]:
        found = self.rig.series("tokenline_oldest_waiting_seconds").items()
        return {labels[0]: round(value, 6) for labels, value in found}

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


def test_the_oldest_waiting_request_of_all_workers_grows_older_between_their_reports() -> None:
    rig = WorkersRig()
    rig.waits(11, 2, m=300.0, other=100.0)
    rig.waits(12, 1, m=500.0)
    assert rig.rig.value("tokenline_queue_depth") == 3
    assert rig.oldest() == {"m": 0.5, "other": 0.1}
    rig.clock.advance_ms(250)
    rig.workers.publish()
    assert rig.oldest() == {"m": 0.75, "other": 0.35}
    rig.waits(12, 0)
    assert rig.oldest() == {"m": 0.55, "other": 0.35}
    rig.waits(11, 0)
    assert rig.oldest() == {"m": 0.0, "other": 0.0}
    assert rig.rig.value("tokenline_queue_depth") == 0


def test_a_silent_workers_requests_wait_no_longer() -> None:
    rig = WorkersRig()
    rig.waits(11, 2, m=300.0)
    rig.clock.advance_ms(SILENCE_NS / 1e6 + 1)
    rig.workers.publish()
    assert rig.oldest() == {"m": 0.0}
    assert rig.rig.value("tokenline_queue_depth") == 0


def test_models_of_waiting_requests_are_bounded() -> None:
    rig = WorkersRig()
    rig.waits(11, 0, **{f"m{number}": 100.0 * number for number in range(6)})
    assert rig.oldest() == {"m0": 0.0, "m1": 0.1, "m2": 0.2, "m3": 0.3, "other": 0.5}


def test_the_lateness_of_a_workers_loop_is_observed_tick_by_tick() -> None:
    rig = WorkersRig()
    rig.workers.report(WorkerState(3, 13, HERE, {}, 0, loop_lags=[1_000_000, 40_000_000]))
    assert rig.rig.value("tokenline_event_loop_lag_seconds_count", worker="3") == 2
    assert rig.rig.value("tokenline_event_loop_lag_seconds_sum", worker="3") == pytest.approx(0.041)


def test_each_workers_share_of_the_places_is_shown() -> None:
    rig = WorkersRig()
    rig.workers.report(WorkerState(1, 11, HERE, {}, 0, places=50))
    rig.workers.report(WorkerState(2, 12, HERE, {}, 0, places=51))
    assert rig.rig.series("tokenline_inflight_places") == {("1",): 50, ("2",): 51}


def test_limits_are_degraded_while_any_living_worker_says_so() -> None:
    rig = WorkersRig()
    rig.workers.report(WorkerState(1, 11, HERE, {}, 0, limits_degraded=True))
    rig.report(12)
    assert rig.rig.value("tokenline_limits_degraded") == 1
    rig.report(11)
    assert rig.rig.value("tokenline_limits_degraded") == 0


def test_an_upstream_that_was_taken_out_has_series_until_no_worker_speaks_of_it() -> None:
    rig = WorkersRig()
    rig.workers.report(WorkerState(1, 11, HERE, {"old": 2, "kept": 0}, 0, breakers={"old": 2, "kept": 0}))
    rig.workers.expect(["kept"])
    rig.workers.publish()
    assert rig.inflight() == {"old": 2, "kept": 0}
    rig.workers.report(WorkerState(1, 11, HERE, {"kept": 0}, 0, breakers={"kept": 0}))
    assert rig.inflight() == {"kept": 0}
    assert list(rig.rig.series("tokenline_breaker_state")) == [("kept",)]
    rig.clock.advance_ms(SILENCE_NS / 1e6 + 1)
    rig.workers.publish()
    assert rig.inflight() == {"kept": 0}
