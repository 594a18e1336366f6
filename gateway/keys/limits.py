"""What a key may use at most."""

from __future__ import annotations

import msgspec


class Limits(msgspec.Struct, frozen=True, omit_defaults=True):
    """What may be used at most; None: as much as is asked for. Tokens are input and output together."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    tokens_per_day: int | None = None
    """A day by UTC."""
    tokens_per_month: int | None = None
    """A month by UTC."""

    @property
    def any(self) -> bool:
        """Whether anything is limited."""
        return self != NO_LIMITS

    @property
    def limits_tokens(self) -> bool:
        """Whether it matters how many tokens an answer has."""
        return (self.tokens_per_minute or self.tokens_per_day or self.tokens_per_month) is not None

    def over(self, other: Limits) -> Limits:
        """These limits, and the other's where this one sets none."""
        pairs = zip(_all(self), _all(other), strict=True)
        return Limits(*(mine if mine is not None else theirs for mine, theirs in pairs))


def _all(limits: Limits) -> tuple[int | None, ...]:
    return msgspec.structs.astuple(limits)


NO_LIMITS = Limits()
