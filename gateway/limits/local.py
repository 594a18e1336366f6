"""Limits in this worker's memory; the budgets of day and month outlive it in a file (`budgets.py`)."""

from __future__ import annotations

from collections import OrderedDict

from gateway.keys.limits import Limits
from gateway.keys.plans import Plans
from gateway.keys.record import KeyRecord
from gateway.limits.budgets import Budgets
from gateway.limits.periods import Calendar, Periods
from gateway.limits.standing import Headers, Over, Standing, refusal
from gateway.limits.window import SlidingWindow
from tracing.clock import Clock

MAX_ACCOUNTS = 20_000
"""Keys whose minute is remembered, about 1.5 KB each; those that were not seen for longest are forgotten first."""
_BUSY_RETRY_SECONDS = 1.0


class Account:
    """What one key has in use."""

    __slots__ = ("limits", "record", "requests", "running", "tokens")

    def __init__(self, record: KeyRecord, limits: Limits) -> None:
        self.record = record
        self.limits = limits
        self.running = 0
        self.requests = SlidingWindow()
        self.tokens = SlidingWindow()


class LocalLimits:
    """Counts by itself what goes through this worker."""

    degraded = False

    def __init__(self, plans: Plans, clock: Clock, budgets: Budgets) -> None:
        self._plans = plans
        self._clock = clock
        self._budgets = budgets
        self._calendar = Calendar()
        self._accounts: OrderedDict[str, Account] = OrderedDict()

    async def enter(self, key: KeyRecord, request_id: str) -> LocalGrant | None:
        """See Limiter; never waits."""
        limits = self._plans.limits_of(key)
        return self.admit(key, limits) if limits.any else None

    def admit(self, key: KeyRecord, limits: Limits) -> LocalGrant:
        """Leave for one request. Raises ApiError 429."""
        account = self._account(key, limits)
        now = self._clock.mono_ns()
        periods = self._calendar.at(self._clock.wall_ns())
        standing = self._standing(account, periods, now)
        over = _over(limits, standing)
        if over is not None:
            error = refusal(over, limits, standing, self._retry_seconds(over, account, standing, now))
            error.extra_headers = tuple((n.decode(), v.decode()) for n, v in standing.headers(limits))
            raise error
        account.running += 1
        if limits.requests_per_minute is not None:
            account.requests.add(now, 1)
            standing.requests += 1
            standing.requests_reset = account.requests.empty_in_ns(now) / 1e9
        return LocalGrant(self, account, standing.headers(limits))

    def debit(self, account: Account, tokens: int) -> None:
        """Tokens that a request turned out to need."""
        limits = account.limits
        if limits.tokens_per_minute is not None:
            account.tokens.add(self._clock.mono_ns(), tokens)
        periods = self._calendar.at(self._clock.wall_ns())
        if limits.tokens_per_day is not None:
            self._budgets.add(account.record.id, periods.day, tokens)
        if limits.tokens_per_month is not None:
            self._budgets.add(account.record.id, periods.month, tokens)

    async def open(self) -> None:
        """Reads the budgets."""
        await self._budgets.load()

    async def run(self) -> None:
        """Writes the budgets down, again and again."""
        await self._budgets.keep()

    async def close(self) -> None:
        """Writes the budgets down for the last time."""
        await self._budgets.flush()

    def _account(self, key: KeyRecord, limits: Limits) -> Account:
        account = self._accounts.get(key.id)
        if account is None:
            account = self._accounts[key.id] = Account(key, limits)
            if len(self._accounts) > MAX_ACCOUNTS:
                self._accounts.popitem(last=False)
        else:
            account.record, account.limits = key, limits
            self._accounts.move_to_end(key.id)
        return account

    def _standing(self, account: Account, periods: Periods, now: int) -> Standing:
        limits, standing = account.limits, Standing(running=account.running)
        if limits.requests_per_minute is not None:
            standing.requests = account.requests.total(now)
            standing.requests_reset = account.requests.empty_in_ns(now) / 1e9
        if limits.tokens_per_minute is not None:
            standing.tokens = account.tokens.total(now)
            standing.tokens_reset = account.tokens.empty_in_ns(now) / 1e9
        wall = self._clock.wall_ns()
        if limits.tokens_per_day is not None:
            standing.day = self._budgets.used(account.record.id, periods.day)
            standing.day_reset = (periods.day_end_ns - wall) / 1e9
        if limits.tokens_per_month is not None:
            standing.month = self._budgets.used(account.record.id, periods.month)
            standing.month_reset = (periods.month_end_ns - wall) / 1e9
        return standing

    def _retry_seconds(self, over: Over, account: Account, standing: Standing, now: int) -> float:
        limits = account.limits
        match over:
            case Over.REQUESTS_PER_MINUTE:
                return account.requests.below_in_ns(now, limits.requests_per_minute or 0) / 1e9
            case Over.TOKENS_PER_MINUTE:
                return account.tokens.below_in_ns(now, limits.tokens_per_minute or 0) / 1e9
            case Over.TOKENS_PER_DAY:
                return standing.day_reset
            case Over.TOKENS_PER_MONTH:
                return standing.month_reset
            case _:
                return _BUSY_RETRY_SECONDS


class LocalGrant:
    """See Grant."""

    __slots__ = ("_account", "_limits", "headers")

    def __init__(self, limits: LocalLimits, account: Account, headers: Headers) -> None:
        self._limits = limits
        self._account = account
        self.headers = headers

    def leave(self, tokens: int) -> None:
        """Gives the place back and debits the tokens."""
        self._account.running -= 1
        if tokens > 0:
            self._limits.debit(self._account, tokens)


def _over(limits: Limits, standing: Standing) -> Over | None:
    """The first limit that has no room; budgets come first, since waiting a minute does not help there."""
    checks = (
        (Over.TOKENS_PER_MONTH, limits.tokens_per_month, standing.month),
        (Over.TOKENS_PER_DAY, limits.tokens_per_day, standing.day),
        (Over.TOKENS_PER_MINUTE, limits.tokens_per_minute, standing.tokens),
        (Over.REQUESTS_PER_MINUTE, limits.requests_per_minute, standing.requests),
        (Over.CONCURRENT_REQUESTS, limits.concurrent_requests, standing.running),
    )
    for over, limit, used in checks:
        if limit is not None and used >= limit:
            return over
    return None
