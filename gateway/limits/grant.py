"""A request that was let in: what its answer's headers say, and what its end gives back."""

from __future__ import annotations

from typing import Protocol

from gateway.keys.record import KeyRecord
from gateway.limits.standing import Headers
from tracing.ledger import Usage


class Grant(Protocol):
    """Leave to send one request. `leave` is called once, whatever became of it."""

    headers: Headers
    """x-ratelimit-* of the answer, as of now."""

    def leave(self, tokens: int) -> None:
        """The request has ended and used `tokens`. Never blocks, never fails."""


class Limiter(Protocol):
    """Lets requests in as far as their keys' limits go. One per worker."""

    async def enter(self, key: KeyRecord, request_id: str) -> Grant | None:
        """Leave for one request; None for a key without limits. Raises ApiError 429, 403 without the plan, 503."""

    async def open(self) -> None:
        """Reads what earlier processes wrote down."""

    async def run(self) -> None:
        """What must be done beside requests, until cancelled."""

    async def close(self) -> None:
        """Writes down what must outlive this process."""

    @property
    def degraded(self) -> bool:
        """Whether limits shared with other gateways can't be asked for."""


def tokens_of(usage: Usage) -> int:
    """Tokens to debit: the upstream's own count, else as many as token events came (then the prompt is unknown)."""
    return (usage.input_tokens or 0) + (usage.output_tokens or 0)
