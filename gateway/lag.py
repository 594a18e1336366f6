"""Event-loop lag: how late the loop runs what is due. A busy relay makes requests wait here, unseen by other marks."""

from __future__ import annotations

import asyncio

from tracing.clock import Clock

TICK_SECONDS = 0.005
_TICK_NS = round(TICK_SECONDS * 1e9)
MAX_SAMPLES = 200
"""Kept between two reports: one a second, the worst of each TICKS_PER_SAMPLE ticks."""
TICKS_PER_SAMPLE = 4


class LoopLag:
    """A tick every TICK_SECONDS; its lateness is the loop's."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._due_ns = 0
        self._stall_ns = 0
        self._stall_end_ns = 0
        """The last tick that was late by a whole tick or more: how late, and when it ran."""
        self._worst_ns = 0
        self._ticks = 0
        self._samples: list[int] = []
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begins to tick on the running loop."""
        self._schedule()

    def stop(self) -> None:
        """Ends the ticking."""
        if self._handle is not None:
            self._handle.cancel()

    def overdue_ns(self, now_ns: int) -> int:
        """How late the loop is at this moment: what whoever runs now may have waited for its turn. Never negative.

        When the loop gets its turn again, its timers may run before what arrived meanwhile: a late tick that ran just
        before has waited for the same turn.
        """
        if now_ns - self._stall_end_ns < _TICK_NS:
            return self._stall_ns
        return max(0, now_ns - self._due_ns) if self._due_ns else 0

    def drain(self) -> list[int]:
        """Lateness of the ticks since the last call, ns: the worst of every few."""
        samples, self._samples = self._samples, []
        return samples

    def _schedule(self) -> None:
        self._due_ns = self._clock.mono_ns() + _TICK_NS
        self._handle = asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)

    def _tick(self) -> None:
        now_ns = self._clock.mono_ns()
        late_ns = max(0, now_ns - self._due_ns)
        self._worst_ns = max(self._worst_ns, late_ns)
        if late_ns >= _TICK_NS:
            self._stall_ns, self._stall_end_ns = late_ns, now_ns
        self._ticks += 1
        if self._ticks >= TICKS_PER_SAMPLE:
            if len(self._samples) < MAX_SAMPLES:
                self._samples.append(self._worst_ns)
            self._ticks, self._worst_ns = 0, 0
        self._schedule()
