"""Active health checks by the relay itself: an upstream that is dead or frozen is left before a request finds out.

Any answer below 500 is healthy: a 404 of a path that the server lacks, or a 401, comes from a server that works. When
the checks of an upstream fail, attempts that wait there for their first byte are struck, so that they go elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from gateway.upstreams.balance import Balancer, Upkeep
from gateway.upstreams.client import UpstreamClient
from gateway.upstreams.http1 import UpstreamFault
from gateway.upstreams.router import Upstream

INTERVAL_SECONDS = 2.0
TIMEOUT_SECONDS = 2.0
FAILURES_TO_HOLD = 2

log = logging.getLogger("tokenline.upstreams")


class HealthChecks:
    """One task for each upstream, as long as it is configured. `follow` says which they are, `run` checks them."""

    def __init__(self, balancer: Balancer, client: UpstreamClient) -> None:
        self._balancer = balancer
        self._client = client
        self._wanted: set[Upstream] = set()
        self._changed = asyncio.Event()

    def follow(self, upstreams: Iterable[Upstream]) -> None:
        """Checks these from now on, and no others. Those that were checked alike before are not disturbed."""
        self._wanted = set(upstreams)
        self._changed.set()

    async def run(self) -> None:
        """Checks until cancelled."""
        watched: dict[Upstream, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                self._changed.clear()
                for upstream in watched.keys() - self._wanted:
                    watched.pop(upstream).cancel()
                    if not any(other.place == upstream.place for other in self._wanted):
                        self._balancer.of(upstream).breaker.hold_open(False)  # nobody would let it go later
                for upstream in self._wanted - watched.keys():
                    watched[upstream] = group.create_task(self._watch(upstream, self._balancer.of(upstream)))
                await self._changed.wait()

    async def _watch(self, upstream: Upstream, upkeep: Upkeep) -> None:
        failures = 0
        while True:
            await asyncio.sleep(INTERVAL_SECONDS)
            problem = await self._problem(upstream)
            failures = failures + 1 if problem else 0
            if failures >= FAILURES_TO_HOLD and not upkeep.breaker.is_held_open:
                if failures == FAILURES_TO_HOLD:
                    log.warning("upstream %s is down: %s", upstream.name, problem)
                upkeep.breaker.hold_open(True)
                upkeep.strike()
            elif not failures and upkeep.breaker.is_held_open:
                log.warning("upstream %s answers again", upstream.name)
                upkeep.breaker.hold_open(False)

    async def _problem(self, upstream: Upstream) -> str | None:
        """What is wrong with it; None when it answers."""
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                status = await self._client.check(upstream)
        except TimeoutError:
            return f"no answer within {TIMEOUT_SECONDS:g} s"
        except UpstreamFault as error:
            return type(error).__name__
        return f"status {status}" if status >= 500 else None
