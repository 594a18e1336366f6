"""Where a key stands against its limits: the headers that tell it, and the refusal when it is over one."""

from __future__ import annotations

import enum
import math

import msgspec

from gateway.keys.limits import Limits
from protocol.errors import ApiError

Headers = list[tuple[bytes, bytes]]
RATELIMIT = b"x-ratelimit-"


class Over(enum.IntEnum):
    """The limit that refuses a request."""

    CONCURRENT_REQUESTS = 1
    REQUESTS_PER_MINUTE = 2
    TOKENS_PER_MINUTE = 3
    TOKENS_PER_DAY = 4
    TOKENS_PER_MONTH = 5


_SETTING = {over: over.name.lower() for over in Over}
_WORDS = {
    Over.CONCURRENT_REQUESTS: ("requests in flight at once", "One must end first."),
    Over.REQUESTS_PER_MINUTE: ("requests in a minute", ""),
    Over.TOKENS_PER_MINUTE: ("tokens in a minute", ""),
    Over.TOKENS_PER_DAY: ("tokens today (UTC)", ""),
    Over.TOKENS_PER_MONTH: ("tokens this month (UTC)", ""),
}
_BUDGETS = (Over.TOKENS_PER_DAY, Over.TOKENS_PER_MONTH)


class Standing(msgspec.Struct):
    """What a key has used of each limit, and when (seconds from now) that is free again."""

    running: int = 0
    requests: int = 0
    requests_reset: float = 0.0
    tokens: int = 0
    tokens_reset: float = 0.0
    day: int = 0
    day_reset: float = 0.0
    month: int = 0
    month_reset: float = 0.0

    def headers(self, limits: Limits) -> Headers:
        """x-ratelimit-* of requests and tokens; of tokens, those of the shortest period that is limited."""
        found: Headers = []
        if limits.requests_per_minute is not None:
            found += _told(b"requests", limits.requests_per_minute, self.requests, self.requests_reset)
        if limits.tokens_per_minute is not None:
            found += _told(b"tokens", limits.tokens_per_minute, self.tokens, self.tokens_reset)
        elif limits.tokens_per_day is not None:
            found += _told(b"tokens", limits.tokens_per_day, self.day, self.day_reset)
        elif limits.tokens_per_month is not None:
            found += _told(b"tokens", limits.tokens_per_month, self.month, self.month_reset)
        return found

    def used(self, over: Over) -> int:
        """What counts against one limit."""
        return {
            Over.CONCURRENT_REQUESTS: self.running,
            Over.REQUESTS_PER_MINUTE: self.requests,
            Over.TOKENS_PER_MINUTE: self.tokens,
            Over.TOKENS_PER_DAY: self.day,
            Over.TOKENS_PER_MONTH: self.month,
        }[over]


def refusal(over: Over, limits: Limits, standing: Standing, retry_seconds: float) -> ApiError:
    """The 429 of a request over a limit: which, used and limit, when to try again."""
    limit = getattr(limits, _SETTING[over])
    what, more = _WORDS[over]
    seconds = max(1, math.ceil(retry_seconds))
    text = f"This key's limit {_SETTING[over]} is reached: {standing.used(over)} of {limit} {what} are used."
    return ApiError(
        429,
        "budget_exceeded" if over in _BUDGETS else "rate_limit_exceeded",
        f"{text} {more or f'Try again in {seconds} s.'}",
        retry_after=seconds,
    )


def _told(what: bytes, limit: int, used: int, reset_seconds: float) -> Headers:
    return [
        (RATELIMIT + b"limit-" + what, b"%d" % limit),
        (RATELIMIT + b"remaining-" + what, b"%d" % max(0, limit - used)),
        (RATELIMIT + b"reset-" + what, b"%ds" % math.ceil(reset_seconds)),
    ]
