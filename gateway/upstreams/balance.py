"""Balancing: which of a model's targets is asked first, and which come after it.

Among targets of one priority, the one with the least expected wait: requests outstanding there times what its first
token took lately, by weight. With affinity, requests with the same beginning prefer the same target, so that its KV
cache is hit, unless it has much more to do than the others.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterable

from gateway.upstreams.breaker import Breaker, BreakerState
from gateway.upstreams.router import Route, Target, Upstream
from protocol.errors import ApiError
from tracing.clock import Clock

EWMA_WEIGHT = 0.2
"""Of the newest TTFT."""
FORGET_SECONDS = 10.0
AFFINITY_BYTES = 1024
AFFINITY_SLACK = 4
"""Requests that the preferred target may have more than the least loaded one."""
MAX_COOLING_SECONDS = 60.0


class Upkeep:
    """What is known of one upstream while the worker lives."""

    def __init__(self, clock: Clock, source: random.Random, name: str) -> None:
        self._clock = clock
        self.name = name
        self.breaker = Breaker(clock, source)
        self.outstanding = 0
        self._ttft_seconds: float | None = None
        self._sampled_ns = 0
        self._cool_until_ns = 0
        self.strikers: dict[int, Callable[[], None]] = {}
        """What ends each attempt that runs there, if its client has nothing yet."""

    def strike(self) -> None:
        """Health checks say that it is down: who waits there for a first byte need not wait longer."""
        for strike in list(self.strikers.values()):
            strike()

    def saw_first_token(self, seconds: float) -> None:
        """A new sample of how long it takes."""
        old = self._ttft_seconds
        self._ttft_seconds = seconds if old is None else old + EWMA_WEIGHT * (seconds - old)
        self._sampled_ns = self._clock.mono_ns()

    @property
    def ttft_seconds(self) -> float | None:
        """Exponentially weighted mean of TTFT (whole answers: of the time to their headers).

        It halves in every FORGET_SECONDS without a sample, so that one that was slow once is tried again.
        """
        if self._ttft_seconds is None:
            return None
        age_seconds = (self._clock.mono_ns() - self._sampled_ns) / 1e9
        return float(self._ttft_seconds * 0.5 ** (age_seconds / FORGET_SECONDS))

    def cool(self, seconds: float) -> None:
        """It asked to be left alone (429 with Retry-After)."""
        self._cool_until_ns = self._clock.mono_ns() + round(min(seconds, MAX_COOLING_SECONDS) * 1e9)

    @property
    def is_cooling(self) -> bool:
        """Whether that time is not over."""
        return self._clock.mono_ns() < self._cool_until_ns


class Balancer:
    """Orders a route's targets for one request. One per worker; knows every upstream's state."""

    def __init__(self, clock: Clock, source: random.Random) -> None:
        self._clock = clock
        self._source = source
        self._upkeep: dict[str, Upkeep] = {}
        """By place."""

    def of(self, upstream: Upstream) -> Upkeep:
        """The state of an upstream."""
        found = self._upkeep.get(upstream.place)
        if found is None:
            found = self._upkeep[upstream.place] = Upkeep(self._clock, self._source, upstream.name)
        return found

    @property
    def upkeep(self) -> Iterable[Upkeep]:
        """Every upstream that was asked for and is not forgotten."""
        return self._upkeep.values()

    def keep(self, upstreams: Iterable[Upstream]) -> None:
        """Forgets all others that have nothing running. Call it again later for those that had."""
        places = {upstream.place for upstream in upstreams}
        gone = [place for place, upkeep in self._upkeep.items() if place not in places and not upkeep.outstanding]
        for place in gone:
            del self._upkeep[place]

    def order(self, route: Route, prefix: bytes = b"") -> list[Target]:
        """The targets to try, best first. Raises ApiError 503 when every breaker is open."""
        usable = [target for target in route.targets if self.of(target.upstream).breaker.can_try()]
        if not usable:
            # Failed checks alone refuse nobody: they may be seconds old, and an attempt costs little.
            usable = [target for target in route.targets if self.of(target.upstream).breaker.is_only_held_open]
        if not usable:
            raise self._none_usable(route)
        if len(usable) == 1:
            return usable
        preferred = self._preferred(route, usable, prefix) if route.affinity and prefix else None
        return sorted(usable, key=lambda target: self._rank(target, preferred))

    def _rank(self, target: Target, preferred: Target | None) -> tuple[bool, bool, int, bool, float]:
        upkeep = self.of(target.upstream)
        # A half-open breaker gets its one trial at once: nobody would learn otherwise that it is well again.
        is_settled = upkeep.breaker.state is not BreakerState.HALF_OPEN
        return is_settled, upkeep.is_cooling, target.priority, target is not preferred, self._expected_wait(target)

    def _expected_wait(self, target: Target) -> float:
        upkeep = self.of(target.upstream)
        # An upstream that nobody has measured yet is worth a try.
        return (upkeep.outstanding + 1) * (upkeep.ttft_seconds or 0.001) / target.weight

    def _preferred(self, route: Route, usable: list[Target], prefix: bytes) -> Target | None:
        """By rendezvous hashing: a target that comes or goes moves only its own share of prefixes."""
        first = min(target.priority for target in usable)
        candidates = [target for target in usable if target.priority == first]
        key = zlib.crc32(prefix[:AFFINITY_BYTES])
        best = max(candidates, key=lambda target: zlib.crc32(target.upstream.name.encode(), key))
        least = min(self.of(target.upstream).outstanding for target in candidates)
        return best if self.of(best.upstream).outstanding <= least + AFFINITY_SLACK else None

    def _none_usable(self, route: Route) -> ApiError:
        waits = [self.of(target.upstream).breaker.opens_in_seconds for target in route.targets]
        names = ", ".join(repr(target.upstream.name) for target in route.targets)
        return ApiError(
            503,
            "upstream_unavailable",
            f"No upstream of {route.model!r} can be asked now: {names} failed repeatedly (stage: connect).",
            retry_after=max(1.0, min(waits)),
        )
