"""Admission: how many requests may be in flight. One more is refused at once instead of queued without end."""

from __future__ import annotations

from types import TracebackType

from protocol.errors import ApiError


class Admission:
    """Counts the requests that are being answered: `with admission:` holds one place.

    Entering raises ApiError 429 queue_full when `limit` are held.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.inflight = 0

    def __enter__(self) -> None:
        if self.inflight >= self._limit:
            raise ApiError(
                429,
                "queue_full",
                f"All {self._limit} places for requests in flight (server.max_concurrent_requests) are taken. "
                "Try again shortly.",
                retry_after=1,
            )
        self.inflight += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.inflight -= 1
