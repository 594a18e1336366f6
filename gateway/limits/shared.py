"""Limits that several gateways share through a Redis, with one round trip before a request and none after it.

While Redis is dead or frozen, requests go on with this worker's own limits or are refused (`redis.on_outage`), and what
they use is remembered and told to Redis when it is back.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Literal

from gateway.keys.limits import Limits
from gateway.keys.plans import Plans
from gateway.keys.record import KeyRecord
from gateway.keys.sparing import Sparing
from gateway.limits.grant import Grant
from gateway.limits.link import PROBE_SECONDS, Link, LinkDown, Script
from gateway.limits.local import LocalLimits
from gateway.limits.periods import Calendar
from gateway.limits.script import ENTER, RENEW, SETTLE
from gateway.limits.standing import Headers, Over, Standing, refusal
from protocol.errors import ApiError
from tracing.clock import Clock

LEASE_MS = 30_000
"""A place in flight of a gateway that died is free again after this."""
RENEW_SECONDS = 10.0
MAX_OWED = 50_000
"""Keys whose tokens are remembered for a Redis that is away."""
IDLE_SECONDS = 0.4
"""How long the probe of a gateway in order waits: nobody waits with it, and a hiccup is no outage."""
NO_PLACE = "-"
KEEP_DAY_SECONDS = 2 * 86_400
KEEP_MONTH_SECONDS = 33 * 86_400

_ENTER, _SETTLE, _RENEW = Script(ENTER), Script(SETTLE), Script(RENEW)

log = logging.getLogger("tokenline.limits")


class SharedLimits:
    """See Limiter. `local` counts during an outage."""

    def __init__(
        self,
        plans: Plans,
        clock: Clock,
        link: Link,
        local: LocalLimits,
        *,
        prefix: str,
        on_outage: Literal["local", "refuse"],
    ) -> None:
        self._plans = plans
        self._clock = clock
        self._link = link
        self._local = local
        self._prefix = prefix
        self._refuses = on_outage == "refuse"
        self._calendar = Calendar()
        self._sparing = Sparing(clock)
        self._running: dict[str, set[str]] = {}
        """Requests in flight by key, of keys whose places are limited."""
        self._owed: dict[str, tuple[Limits, int]] = {}
        """Tokens by key that Redis has not been told of."""

    @property
    def degraded(self) -> bool:
        """Redis can't be asked."""
        return self._link.down

    async def enter(self, key: KeyRecord, request_id: str) -> Grant | None:
        """See Limiter; waits at most redis.timeout_ms, or twice that behind an answer that was just in time."""
        limits = self._plans.limits_of(key)
        if not limits.any:
            return None
        if self._link.down:
            return self._without_redis(key, limits)
        words = (
            f"{_number(limits.requests_per_minute)} {_number(limits.tokens_per_minute)} "
            f"{_number(limits.concurrent_requests)} {_number(limits.tokens_per_day)} "
            f"{_number(limits.tokens_per_month)} {request_id} {LEASE_MS}"
        )
        try:
            answer = await self._link.ask(_ENTER, self._keys(key.id), words)
        except LinkDown as error:
            self._say(str(error))
            return self._without_redis(key, limits)
        return self._granted(key, limits, request_id, [int(word) for word in answer.split()])

    def settle(self, key_id: str, limits: Limits, request_id: str, tokens: int) -> None:
        """Gives a request's place back and debits its tokens, beside the caller."""
        if limits.concurrent_requests is not None and (running := self._running.get(key_id)) is not None:
            running.discard(request_id)
            if not running:
                del self._running[key_id]
        if limits.concurrent_requests is None and not (tokens and limits.limits_tokens):
            return
        if self._link.down:
            self.owe(key_id, limits, tokens)
            return
        member = request_id if limits.concurrent_requests is not None else NO_PLACE
        self._tell(key_id, limits, member, tokens)

    def owe(self, key_id: str, limits: Limits, tokens: int) -> None:
        """Remembers tokens for when Redis is back."""
        if tokens <= 0 or not limits.limits_tokens:
            return
        if key_id in self._owed or len(self._owed) < MAX_OWED:
            self._owed[key_id] = (limits, tokens + self._owed.get(key_id, (limits, 0))[1])

    async def open(self) -> None:
        """Reads the local budgets; the link opens by itself."""
        await self._local.open()

    async def run(self) -> None:
        """Probes a Redis that is away, renews the leases of long requests, and flushes the local budgets."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._local.run())
            group.create_task(self._watch())

    async def close(self) -> None:
        """Writes down and lets go."""
        await self._local.close()
        await self._link.close()

    async def _watch(self) -> None:
        await self._link.probe()
        passed, was_down = 0.0, False
        while True:
            await asyncio.sleep(PROBE_SECONDS)
            passed += PROBE_SECONDS
            was_down = was_down or self._link.down
            if not await self._link.probe(0 if was_down else IDLE_SECONDS):
                was_down = True
                self._say(self._link.reason)
                continue
            if was_down:
                was_down = False
                log.info("Redis answers again; limits are shared")
            self._pay()
            if passed >= RENEW_SECONDS:
                passed = 0.0
                self._renew()

    def _granted(self, key: KeyRecord, limits: Limits, request_id: str, answer: list[int]) -> SharedGrant:
        wall = self._clock.wall_ns()
        periods = self._calendar.at(wall)
        over, running, requests, requests_ms, tokens, tokens_ms, day, month, retry_ms = answer
        standing = Standing(
            running=running,
            requests=requests,
            requests_reset=requests_ms / 1e3,
            tokens=tokens,
            tokens_reset=tokens_ms / 1e3,
            day=day,
            day_reset=(periods.day_end_ns - wall) / 1e9,
            month=month,
            month_reset=(periods.month_end_ns - wall) / 1e9,
        )
        headers = standing.headers(limits)
        if over:
            reset = {Over.TOKENS_PER_DAY: standing.day_reset, Over.TOKENS_PER_MONTH: standing.month_reset}
            error = refusal(Over(over), limits, standing, reset.get(Over(over), retry_ms / 1e3))
            error.extra_headers = tuple((n.decode(), v.decode()) for n, v in headers)
            raise error
        if limits.concurrent_requests is not None:
            self._running.setdefault(key.id, set()).add(request_id)
        return SharedGrant(self, key.id, limits, request_id, headers)

    def _without_redis(self, key: KeyRecord, limits: Limits) -> OutageGrant:
        if self._refuses:
            raise ApiError(
                503, "limits_unavailable", "Limits can't be checked right now. Try again shortly.", retry_after=2
            )
        return OutageGrant(self, key.id, limits, self._local.admit(key, limits))

    def _tell(self, key_id: str, limits: Limits, member: str, tokens: int) -> None:
        kinds = (limits.tokens_per_minute, limits.tokens_per_day, limits.tokens_per_month)
        limited = " ".join("0" if limit is None else "1" for limit in kinds)
        words = f"{tokens} {limited} {member} {KEEP_DAY_SECONDS} {KEEP_MONTH_SECONDS}"
        told = self._link.ask(_SETTLE, self._keys(key_id), words)
        told.add_done_callback(lambda done: self._told(done, key_id, limits, tokens))

    def _told(self, done: asyncio.Future[Any], key_id: str, limits: Limits, tokens: int) -> None:
        error = None if done.cancelled() else done.exception()
        if isinstance(error, LinkDown):
            self._say(str(error))
            if not error.may_be_done:  # what Redis has got it debits when it thaws: nobody pays twice
                self.owe(key_id, limits, tokens)

    def _pay(self) -> None:
        """Tells Redis what was used while it was away. Tokens of minutes long past count in the present one."""
        owed, self._owed = self._owed, {}
        for key_id, (limits, tokens) in owed.items():
            self._tell(key_id, limits, NO_PLACE, tokens)

    def _renew(self) -> None:
        for key_id, running in self._running.items():
            told = self._link.ask(_RENEW, [self._keys(key_id)[2]], " ".join([str(LEASE_MS), *running]))
            told.add_done_callback(_seen)

    def _keys(self, key_id: str) -> list[str]:
        """Names in Redis; the braces keep a key's together in a cluster."""
        periods = self._calendar.at(self._clock.wall_ns())
        base = f"{self._prefix}:{{{key_id}}}:"
        return [base + part for part in ("requests", "tokens", "places", periods.day, periods.month)]

    def _say(self, reason: str) -> None:
        if self._sparing.due():
            then = "limited keys are refused" if self._refuses else "each gateway limits by itself"
            log.warning("Redis can't be asked for limits (%s): %s until it answers", reason, then)


class SharedGrant:
    """See Grant: one that Redis gave."""

    __slots__ = ("_key_id", "_limits", "_request_id", "_shared", "headers")

    def __init__(self, shared: SharedLimits, key_id: str, limits: Limits, request_id: str, headers: Headers) -> None:
        self._shared = shared
        self._key_id = key_id
        self._limits = limits
        self._request_id = request_id
        self.headers = headers

    def leave(self, tokens: int) -> None:
        """Settles with Redis."""
        self._shared.settle(self._key_id, self._limits, self._request_id, tokens)


class OutageGrant:
    """See Grant: one that this worker gave by itself, while Redis was away."""

    __slots__ = ("_grant", "_key_id", "_limits", "_shared", "headers")

    def __init__(self, shared: SharedLimits, key_id: str, limits: Limits, grant: Grant) -> None:
        self._shared = shared
        self._key_id = key_id
        self._limits = limits
        self._grant = grant
        self.headers = grant.headers

    def leave(self, tokens: int) -> None:
        """Settles here, and with Redis when it is back."""
        self._grant.leave(tokens)
        self._shared.owe(self._key_id, self._limits, tokens)


def _number(limit: int | None) -> int:
    return -1 if limit is None else limit


def _seen(done: asyncio.Future[Any]) -> None:
    """A lease that could not be renewed runs out; the failure has been told by the breaker."""
    if not done.cancelled():
        done.exception()
