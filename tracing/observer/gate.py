"""The gate of the OTLP receiver: how many bodies are held at once, and what share of one core reading them may take.

Spans come from senders that try again; records of requests do not. So spans yield: beyond the share they are refused
until there is time again, and senders are told to wait.
"""

from __future__ import annotations

from tracing.clock import Clock

MAX_BODIES = 4
SHARE = 0.5
BURST_SECONDS = 2.0
"""Unused time that may be saved up, so that a burst within it is taken whole."""


class Gate:
    """`enter` before a body is read and `leave` after it; `spend` the CPU seconds that it took."""

    def __init__(
        self, clock: Clock, *, bodies: int = MAX_BODIES, share: float = SHARE, burst_seconds: float = BURST_SECONDS
    ) -> None:
        self._clock = clock
        self._free = bodies
        self._share = share
        self._burst = burst_seconds
        self._credit = burst_seconds
        self._looked_ns = clock.mono_ns()

    def enter(self) -> bool:
        """Whether a body may be read now; a True must be followed by `leave`."""
        now = self._clock.mono_ns()
        self._credit = min(self._burst, self._credit + (now - self._looked_ns) / 1e9 * self._share)
        self._looked_ns = now
        if not self._free or self._credit <= 0:
            return False
        self._free -= 1
        return True

    def leave(self) -> None:
        """The body is no longer held."""
        self._free += 1

    def spend(self, cpu_seconds: float) -> None:
        """May take more than there is: what follows waits the longer."""
        self._credit -= cpu_seconds
