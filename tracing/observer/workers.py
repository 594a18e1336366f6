"""The relay workers as they are now: who lives, what is in flight, what waits and since when, what was dropped."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping

import msgspec
from prometheus_client import Gauge

from protocol.timings import HostIdentity
from tracing.clock import Clock
from tracing.ledger import WorkerState
from tracing.observer.labels import Bounded
from tracing.observer.waiting import Waiting

SILENCE_NS = 5_000_000_000
MAX_WORKERS = 1024


class _Seen(msgspec.Struct, frozen=True):
    state: WorkerState
    at_ns: int


class Workers:
    """Last state of each worker process. A worker that is silent for SILENCE_NS is no longer counted."""

    def __init__(
        self,
        clock: Clock,
        gauges: Mapping[str, Gauge],
        *,
        max_names: int,
        dropped: Callable[[int], None],
        lagged: Callable[[int, list[int]], None],
        waiting: Waiting,
    ) -> None:
        """`dropped` is told how many more ledgers were lost, `lagged` how late (ns) a worker's loop ran its ticks."""
        self._clock = clock
        self._inflight = gauges["tokenline_inflight_requests"]
        self._places = gauges["tokenline_inflight_places"]
        self._queue_depth = gauges["tokenline_queue_depth"]
        self._limits_degraded = gauges["tokenline_limits_degraded"]
        self._breaker_state = gauges["tokenline_breaker_state"]
        self._oldest_waiting = gauges["tokenline_oldest_waiting_seconds"]
        self._upstreams = Bounded(max_names)
        self._models = Bounded(max_names)
        self._numbers = Bounded(max_names)
        self._dropped = dropped
        self._lagged = lagged
        self._waiting = waiting
        self._seen: dict[int, _Seen] = {}  # by pid, the longest silent first
        self._published: set[str] = set()
        self._configured: set[str] | None = None
        self._waited: set[str] = set()

    def report(self, state: WorkerState) -> None:
        """One worker's own account of itself."""
        before = self._seen.pop(state.pid, None)
        lost_before = before.state.ledgers_dropped if before else 0
        # A pid that counts from a lower number is a new process: all that it lost is new.
        lost = state.ledgers_dropped - lost_before if state.ledgers_dropped >= lost_before else state.ledgers_dropped
        if lost > 0:
            self._dropped(lost)
        now_ns = self._clock.mono_ns()
        self._seen[state.pid] = _Seen(state, now_ns)
        self._waiting.report(state, now_ns)
        if len(self._seen) > MAX_WORKERS:
            del self._seen[next(iter(self._seen))]
        if state.loop_lags:
            self._lagged(state.worker, state.loop_lags)
        self.publish()

    def expect(self, upstreams: Iterable[str]) -> None:
        """These are configured from now on: series of others end with the last worker that speaks of them."""
        self._configured = set(upstreams)

    def publish(self) -> None:
        """Sets the gauges to what live workers said; upstreams and models without requests show 0.

        The age of the oldest request grows on between two reports of its worker.
        """
        live = self.live()
        self._publish_breakers(live)
        self._publish_inflight(live)
        self._limits_degraded.set(any(state.limits_degraded for state in live))
        self._publish_waiting(live)
        for state in live:
            (name,) = self._numbers.keep(str(state.worker))
            self._places.labels(name).set(state.places)

    def _publish_waiting(self, live: list[WorkerState]) -> None:
        self._queue_depth.set(sum(state.queue_depth for state in live))
        now = self._clock.mono_ns()
        ages = dict.fromkeys(self._waited, 0.0)
        for model, ingress in self._waiting.oldest(state.worker for state in live).items():
            (name,) = self._models.keep(model)
            ages[name] = max(ages.get(name, 0.0), (now - ingress) / 1e9)
        for name, seconds in ages.items():
            self._oldest_waiting.labels(name).set(seconds)
        self._waited = set(ages)

    def _publish_breakers(self, live: list[WorkerState]) -> None:
        worst: dict[str, int] = {}
        for state in live:
            for upstream, breaker in state.breakers.items():
                (name,) = self._upstreams.keep(upstream)
                worst[name] = max(worst.get(name, 0), breaker)
        for name, breaker in worst.items():
            self._breaker_state.labels(name).set(breaker)

    def _publish_inflight(self, live: list[WorkerState]) -> None:
        sums = dict.fromkeys(self._published, 0)
        for state in live:
            for upstream, count in state.inflight.items():
                (name,) = self._upstreams.keep(upstream)
                sums[name] = sums.get(name, 0) + count
        spoken_of = {self._upstreams.keep(name)[0] for state in live for name in state.inflight}
        for name in [name for name in sums if self._has_gone(name, spoken_of)]:
            del sums[name]
            for gauge in (self._inflight, self._breaker_state):
                with contextlib.suppress(KeyError):
                    gauge.remove(name)
        for name, count in sums.items():
            self._inflight.labels(name).set(count)
        self._published = set(sums)

    def _has_gone(self, upstream: str, spoken_of: set[str]) -> bool:
        return self._configured is not None and upstream not in self._configured and upstream not in spoken_of

    def live(self) -> list[WorkerState]:
        """Workers heard of within SILENCE_NS."""
        since = self._clock.mono_ns() - SILENCE_NS
        return [seen.state for seen in self._seen.values() if seen.at_ns > since]

    def host_of(self, worker: int, default: HostIdentity) -> HostIdentity:
        """Whose clock this worker's ledgers are written by."""
        for seen in reversed(self._seen.values()):
            if seen.state.worker == worker:
                return seen.state.host
        return default
