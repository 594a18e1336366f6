"""Time limits of one attempt: connecting, first byte, silence, and the request's total."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import StrEnum
from types import TracebackType

from gateway.upstreams.router import UpstreamLimits
from protocol.errors import ApiError
from settings.schema import ServerSettings


class Phase(StrEnum):
    """Where an attempt is; named in the error when its time is over."""

    CONNECT = "connect"
    FIRST_BYTE = "first_byte"
    IDLE = "idle"
    TOTAL = "total"
    HEALTH = "health"
    """Struck: health checks found the upstream down while the request waited for its first byte."""
    WRITE = "client_write"
    """Not the upstream's: the client takes nothing of what waits for it."""


_WHAT = {
    Phase.CONNECT: "gave no connection",
    Phase.FIRST_BYTE: "sent no first byte",
    Phase.IDLE: "went silent",
    Phase.TOTAL: "was not done",
    Phase.WRITE: "could not be passed on",
    Phase.HEALTH: "failed its health checks while the request waited",
}


class Deadlines:
    """An async context that raises TimeoutError inside its block when the current phase's time is over.

    `enter(phase)` is called for every event, so it only notes the new end; the timer looks at it when it fires.
    `taken_at` tells when the client was last seen to take something: one that is slow has time for as long as it does.
    """

    def __init__(
        self, limits: ServerSettings, total_at: float, own: UpstreamLimits, taken_at: Callable[[], float]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._seconds = {
            Phase.CONNECT: own.connect or limits.connect_timeout_seconds,
            Phase.FIRST_BYTE: own.first_byte or limits.first_byte_timeout_seconds,
            Phase.IDLE: own.idle or limits.idle_timeout_seconds,
            Phase.TOTAL: limits.request_timeout_seconds,
            Phase.WRITE: limits.client_write_timeout_seconds,
        }
        self._total_at = total_at
        self._taken_at = taken_at
        self._ends_at = total_at
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[object] | None = None
        self._expired = False
        self.phase = Phase.TOTAL
        self.is_client_slow = False
        """The time runs, or ran out, while the client is to take bytes."""

    def enter(self, phase: Phase) -> None:
        """From now on this phase's limit counts, or the total where that ends sooner."""
        ends_at = self._loop.time() + self._seconds[phase]
        self.phase = phase
        self.is_client_slow = phase is Phase.WRITE
        if ends_at >= self._total_at:
            self.phase, ends_at = Phase.TOTAL, self._total_at
        self._ends_at = ends_at
        # A later end is noticed when the timer fires; only an earlier one has to move it.
        if self._timer is not None and ends_at < self._timer.when():
            self._timer.cancel()
            self._arm()

    def strike(self) -> None:
        """Ends the block now: the upstream is down."""
        self.phase = Phase.HEALTH
        self.is_client_slow = False
        self._ends_at = 0.0
        if self._timer is not None:
            self._timer.cancel()
            self._fire()

    async def __aenter__(self) -> Deadlines:
        self._task = asyncio.current_task()
        self._arm()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        # Whoever cancelled besides us (a client that left) keeps the word: uncancel tells.
        if self._expired and self._task is not None and self._task.uncancel() == 0 and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def _arm(self) -> None:
        self._timer = self._loop.call_at(self._ends_at, self._fire)

    def _fire(self) -> None:
        if self.is_client_slow:
            taken_until = self._taken_at() + self._seconds[Phase.WRITE]
            self._ends_at = min(self._total_at, max(self._ends_at, taken_until))
        if self._loop.time() < self._ends_at:
            self._arm()
        elif self._task is not None:
            self._timer = None
            self._expired = True
            self._task.cancel()

    def error(self, upstream: str) -> ApiError:
        """The 504 that names the phase and the setting that limits it; of one that was struck, a 503."""
        if self.phase is Phase.HEALTH:
            text = f"The upstream {upstream!r} {_WHAT[self.phase]} (stage: first byte)."
            return ApiError(503, "upstream_unavailable", text, retry_after=2)
        setting = "request_timeout_seconds" if self.phase is Phase.TOTAL else f"{self.phase}_timeout_seconds"
        return ApiError(
            504,
            "upstream_timeout",
            f"The upstream {upstream!r} {_WHAT[self.phase]} within {self._seconds[self.phase]:g} s "
            f"(stage: {self.phase}; server.{setting}).",
        )
