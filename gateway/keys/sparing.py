"""Saying once a minute what happens all the time."""

from __future__ import annotations

from tracing.clock import Clock


class Sparing:
    """`due()` is true at most once in `seconds`."""

    def __init__(self, clock: Clock, seconds: float = 60) -> None:
        self._clock = clock
        self._every_ns = round(seconds * 1e9)
        self._said_ns: int | None = None

    def due(self) -> bool:
        """Whether it may be said now; asking counts as saying."""
        now = self._clock.mono_ns()
        if self._said_ns is not None and now - self._said_ns < self._every_ns:
            return False
        self._said_ns = now
        return True
