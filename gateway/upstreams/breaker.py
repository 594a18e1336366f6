"""A breaker: an upstream that keeps failing is left alone for a while, then tried by one request at a time.

Only the upstream's own failures count (no connection, a 5xx, silence, a broken stream); a client's error never does.
"""

from __future__ import annotations

import random
from enum import IntEnum

from tracing.clock import Clock

FAILURES_TO_OPEN = 3
FIRST_OPEN_SECONDS = 2.0
MAX_OPEN_SECONDS = 60.0


class BreakerState(IntEnum):
    """As `tokenline_breaker_state` shows it."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


class Breaker:
    """One upstream's. `can_try` asks, `tried` claims the one trial of a half-open breaker; one result follows each."""

    def __init__(self, clock: Clock, source: random.Random) -> None:
        self._clock = clock
        self._source = source
        self._failures = 0
        self._opened_times = 0
        self._open_until_ns = 0
        self._trial_running = False
        self._held_open = False

    @property
    def state(self) -> BreakerState:
        """What it is now."""
        if self._held_open or self._clock.mono_ns() < self._open_until_ns:
            return BreakerState.OPEN
        return BreakerState.HALF_OPEN if self._open_until_ns else BreakerState.CLOSED

    @property
    def opens_in_seconds(self) -> float:
        """Until a trial is let through; 0 when one would be now."""
        return max(0.0, (self._open_until_ns - self._clock.mono_ns()) / 1e9)

    def can_try(self) -> bool:
        """Whether a request may go there now."""
        state = self.state
        return state is BreakerState.CLOSED or (state is BreakerState.HALF_OPEN and not self._trial_running)

    def tried(self) -> None:
        """A request goes there."""
        if self.state is BreakerState.HALF_OPEN:
            self._trial_running = True

    def succeeded(self) -> None:
        """It answered: whatever went wrong before is over."""
        self._failures = self._opened_times = self._open_until_ns = 0
        self._trial_running = self._held_open = False

    def failed(self) -> None:
        """It failed; the third time in a row, or in its trial, it is left alone: twice as long each time, jittered."""
        self._failures += 1
        if self._trial_running or self._failures >= FAILURES_TO_OPEN:
            self._open()

    def gave_up(self) -> None:
        """The request ended without a word on the upstream (its client left): the trial is free again."""
        self._trial_running = False

    @property
    def is_held_open(self) -> bool:
        """Whether health checks keep it open."""
        return self._held_open

    @property
    def is_only_held_open(self) -> bool:
        """Whether nothing but health checks speaks against it."""
        return self._held_open and not self._open_until_ns

    def hold_open(self, held: bool) -> None:
        """By health checks: open for as long as they fail; once they pass, one trial decides."""
        if self._held_open and not held:
            self._open_until_ns = self._clock.mono_ns()
            self._trial_running = False
        self._held_open = held

    def _open(self) -> None:
        seconds = min(MAX_OPEN_SECONDS, FIRST_OPEN_SECONDS * 2**self._opened_times) * self._source.uniform(0.8, 1.2)
        self._opened_times += 1
        self._open_until_ns = self._clock.mono_ns() + round(seconds * 1e9)
        self._trial_running = False
