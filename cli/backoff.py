"""How long to wait before what died is started again."""

from __future__ import annotations

FIRST_SECONDS = 0.2
CEILING_SECONDS = 10.0
HEALTHY_SECONDS = 30.0


class Backoff:
    """0.2 s, doubling to 10 s; back to the beginning after a life of 30 s."""

    def __init__(self) -> None:
        self._next_seconds = FIRST_SECONDS

    def delay_after(self, lived_seconds: float) -> float:
        """Seconds to wait after a life of this length."""
        if lived_seconds >= HEALTHY_SECONDS:
            self._next_seconds = FIRST_SECONDS
        delay = self._next_seconds
        self._next_seconds = min(CEILING_SECONDS, delay * 2)
        return delay
