"""Limits of one machine: counted in memory, which its workers can read of each other where there are several
(`board.py`). The budgets of day and month outlive them in a file (`budgets.py`)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from gateway.keys.limits import Limits
from gateway.keys.plans import Plans
from gateway.keys.record import KeyRecord
from gateway.limits.board import Board, Counters, Used, hash_of
from gateway.limits.budgets import Budgets
from gateway.limits.periods import Calendar
from gateway.limits.standing import Headers, Over, Standing, refusal
from gateway.limits.window import seconds_to_empty
from tracing.clock import Clock

MAX_ACCOUNTS = 20_000
"""Keys whose minute is remembered, about 1.5 KB each; those that were not seen for longest are forgotten first."""
_BUSY_RETRY_SECONDS = 1.0


class Account:
    """What one key has in use."""

    __slots__ = ("counters", "key_hash", "known", "limits", "record")

    def __init__(self, record: KeyRecord, limits: Limits, key_hash: int, counters: Counters) -> None:
        self.record = record
        self.limits = limits
        self.key_hash = key_hash
        self.counters = counters
        """This worker's."""
        self.known: dict[int, Counters] = {}
        """Siblings', see Board.others."""


class LocalLimits:
    """Counts what goes through this worker, and what its siblings have counted where there is a board of them."""

    def __init__(
        self, plans: Plans, clock: Clock, budgets: Budgets, board: Board | None = None, *, degraded: bool = False
    ) -> None:
        """`degraded`: there are siblings, and no board to share."""
        self.degraded = degraded
        self._plans = plans
        self._clock = clock
        self._budgets = budgets
        self._board = board
        self._calendar = Calendar()
        self._accounts: OrderedDict[str, Account] = OrderedDict()

    async def enter(self, key: KeyRecord, request_id: str) -> LocalGrant | None:
        """See Limiter; never waits."""
        limits = self._plans.limits_of(key)
        return self.admit(key, limits) if limits.any else None

    def admit(self, key: KeyRecord, limits: Limits) -> LocalGrant:
        """Leave for one request. Raises ApiError 429."""
        account = self._account(key, limits)
        counters = account.counters
        now = self._clock.mono_ns()
        newest = counters.requests.newest
        # Counted before it is looked: of two workers that let requests in at the same moment, one at least sees both.
        # Where both do, both give way: rather one too few than one too many.
        counters.running += 1
        if limits.requests_per_minute is not None:
            counters.requests.add(now, 1)
        standing = self._standing(account, now)
        over = _over(limits, standing)
        if over is None:
            return LocalGrant(self, account, standing.headers(limits))
        counters.running -= 1
        if limits.requests_per_minute is not None:
            counters.requests.take_back(1, newest)
        standing = self._standing(account, now)
        error = refusal(over, limits, standing, self._retry_seconds(over, account, standing, now))
        error.extra_headers = tuple((n.decode(), v.decode()) for n, v in standing.headers(limits))
        raise error

    def debit(self, account: Account, tokens: int) -> None:
        """Tokens that a request turned out to need."""
        limits = account.limits
        if limits.tokens_per_minute is not None:
            account.counters.tokens.add(self._clock.mono_ns(), tokens)
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
            key_hash = hash_of(key.id)
            account = self._accounts[key.id] = Account(key, limits, key_hash, self._counters(key_hash))
            if len(self._accounts) > MAX_ACCOUNTS:
                self._accounts.popitem(last=False)
            return account
        account.record, account.limits = key, limits
        self._accounts.move_to_end(key.id)
        if self._board is not None and not self._board.holds(account.key_hash, account.counters):
            account.counters = self._counters(account.key_hash)  # it rested, and another key needed the place
        return account

    def _counters(self, key_hash: int) -> Counters:
        return Counters() if self._board is None else self._board.counters(key_hash)

    def _others(self, account: Account) -> Iterable[Counters]:
        """What siblings count of the same key."""
        return () if self._board is None else self._board.others(account.key_hash, account.known)

    def _standing(self, account: Account, now: int) -> Standing:
        limits, used = account.limits, Used()
        account.counters.add_to(used, now)
        for other in self._others(account):
            other.add_to(used, now)
        standing = Standing(running=used.running)
        if limits.requests_per_minute is not None:
            standing.requests = used.requests
            standing.requests_reset = seconds_to_empty(used.requests_newest, now)
        if limits.tokens_per_minute is not None:
            standing.tokens = used.tokens
            standing.tokens_reset = seconds_to_empty(used.tokens_newest, now)
        wall = self._clock.wall_ns()
        periods = self._calendar.at(wall)
        if limits.tokens_per_day is not None:
            standing.day = self._budgets.used(account.record.id, periods.day)
            standing.day_reset = (periods.day_end_ns - wall) / 1e9
        if limits.tokens_per_month is not None:
            standing.month = self._budgets.used(account.record.id, periods.month)
            standing.month_reset = (periods.month_end_ns - wall) / 1e9
        return standing

    def _retry_seconds(self, over: Over, account: Account, standing: Standing, now: int) -> float:
        limits, counters, others = account.limits, account.counters, list(self._others(account))
        match over:
            case Over.REQUESTS_PER_MINUTE:
                windows = [other.requests for other in others]
                return counters.requests.below_in_ns(now, limits.requests_per_minute or 0, windows) / 1e9
            case Over.TOKENS_PER_MINUTE:
                windows = [other.tokens for other in others]
                return counters.tokens.below_in_ns(now, limits.tokens_per_minute or 0, windows) / 1e9
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
        self._account.counters.running -= 1
        if tokens > 0:
            self._limits.debit(self._account, tokens)


def _over(limits: Limits, standing: Standing) -> Over | None:
    """The first limit that has no room for a request that is counted in already; budgets come first, since waiting a
    minute does not help there."""
    checks = (
        (Over.TOKENS_PER_MONTH, limits.tokens_per_month, standing.month + 1),
        (Over.TOKENS_PER_DAY, limits.tokens_per_day, standing.day + 1),
        (Over.TOKENS_PER_MINUTE, limits.tokens_per_minute, standing.tokens + 1),
        (Over.REQUESTS_PER_MINUTE, limits.requests_per_minute, standing.requests),
        (Over.CONCURRENT_REQUESTS, limits.concurrent_requests, standing.running),
    )
    for over, limit, used in checks:
        if limit is not None and used > limit:
            return over
    return None
