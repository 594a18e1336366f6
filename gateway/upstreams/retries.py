"""The retry budget: retries are a share of the requests, so that a failing upstream is not met with more load."""

from __future__ import annotations

SHARE = 0.2
"""Retries that every request earns."""
BURST = 10.0
"""Retries that may be saved up."""


class RetryBudget:
    """One per worker. `earn` for every request; `spend` asks for one retry and takes it."""

    def __init__(self) -> None:
        self._saved = BURST

    def earn(self) -> None:
        """A request begins."""
        self._saved = min(BURST, self._saved + SHARE)

    def spend(self) -> bool:
        """Whether one more attempt may be made."""
        if self._saved < 1:
            return False
        self._saved -= 1
        return True
