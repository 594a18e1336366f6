"""The token budget of a step: what the settings give, and less for a while after a step ran out of memory."""

from __future__ import annotations

GROW_AFTER_STEPS = 8
"""The budget doubles again each time this many steps went well."""


class TokenBudget:
    """Tokens that the next step may hold."""

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens = most_tokens
        self._went_well = 0
        self.tokens = most_tokens

    def shrink(self, failed_tokens: int) -> None:
        """A step of this size was too large: the next ones are at most half of it."""
        self.tokens = max(1, min(self.tokens, failed_tokens // 2))
        self._went_well = 0

    def step_went_well(self) -> None:
        """A step ended as it should."""
        if self.tokens < self._most_tokens:
            self._went_well += 1
            if self._went_well % GROW_AFTER_STEPS == 0:
                self.tokens = min(self._most_tokens, 2 * self.tokens)
