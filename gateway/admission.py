"""Admission: how many requests may be in flight, and how many may wait for a place, in the order in which they came."""

from __future__ import annotations

import asyncio
from collections import deque

from protocol.errors import ApiError
from settings.schema import ServerSettings


class Admission:
    """`await enter()` takes a place, `leave()` gives it back: to who has waited longest, if anybody waits."""

    def __init__(self, limits: ServerSettings) -> None:
        # A worker's share of the host's; together they may be a few over it, never under.
        self._limit = -(-limits.max_concurrent_requests // limits.workers)
        self._queue_size = -(-limits.queue_size // limits.workers)
        self._queue_seconds = limits.queue_timeout_ms / 1e3
        self._queue: deque[asyncio.Future[None]] = deque()
        self.inflight = 0

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    async def enter(self) -> None:
        """Takes a place, perhaps after a wait. Raises ApiError 429 queue_full when there is none to be had in time."""
        if self.inflight < self._limit:
            self.inflight += 1
            return
        if len(self._queue) >= self._queue_size:
            raise self._full("and the queue of {} (server.queue_size) is full" if self._queue_size else "")
        place = asyncio.get_running_loop().create_future()
        self._queue.append(place)
        try:
            async with asyncio.timeout(self._queue_seconds):
                await asyncio.shield(place)
        except TimeoutError:
            if not place.done():
                self._queue.remove(place)
                raise self._full(f"and none became free within {self._queue_seconds * 1e3:g} ms") from None
        except asyncio.CancelledError:
            # Whoever leaves while waiting gives up the turn, or the place that was handed over in the same moment.
            if place.done():
                self.leave()
            else:
                self._queue.remove(place)
            raise

    def leave(self) -> None:
        """Gives a place back."""
        if self._queue:
            self._queue.popleft().set_result(None)
        else:
            self.inflight -= 1

    def _full(self, more: str) -> ApiError:
        more = f" {more.format(self._queue_size)}" if more else ""
        return ApiError(
            429,
            "queue_full",
            f"All {self._limit} places for requests in flight (server.max_concurrent_requests) are taken{more}. "
            "Try again shortly.",
            retry_after=1,
        )
