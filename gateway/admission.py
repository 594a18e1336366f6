"""Admission: how many requests may be in flight, and how many may wait for a place; no key crowds out another.

A place that becomes free goes to the waiting key that holds the fewest places, among equals to the one that had one
longest ago, and within a key to who came first. When the queue is full, the key that holds most of it and of the places
gives way: its newest waiting request is refused, or the newcomer itself where that is one of its own.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from gateway.ranking import Ranking
from protocol.errors import ApiError
from settings.schema import ServerSettings

RETRY_SECONDS = 1

_Place = asyncio.Future[None]
_Line = OrderedDict[_Place, None]
"""The waiting requests of one key, the oldest first."""


class Admission:
    """`await enter(key)` takes a place, `leave(key)` gives it back: to who comes next, if anybody waits."""

    def __init__(self, limits: ServerSettings) -> None:
        self._lines: dict[str, _Line] = {}
        """Of keys that have anybody waiting."""
        self._held: dict[str, int] = {}
        """Places by key, of keys that have any."""
        self._by_held = Ranking()
        """Waiting keys, the one with the fewest places first."""
        self._by_share = Ranking()
        """Waiting keys, the one with most places and waiting requests together first."""
        self.inflight = 0
        self.waiting = 0
        """Requests in the queue."""
        self._take(limits)

    def resize(self, limits: ServerSettings) -> None:
        """Other limits from now on. Nobody who is in or waits is put out; places that are new are given out."""
        self._take(limits)
        while self.inflight < self.limit and self.waiting:
            self.inflight += 1
            self._hand_over()

    def _take(self, limits: ServerSettings) -> None:
        # A worker's share of the host's; together they may be a few over it, never under.
        self.limit = -(-limits.max_concurrent_requests // limits.workers)
        self._queue_size = -(-limits.queue_size // limits.workers)
        self._queue_seconds = limits.queue_timeout_ms / 1e3

    async def enter(self, key: str) -> None:
        """Takes a place, perhaps after a wait. Raises ApiError 429 queue_full when there is none to be had in time."""
        if self.inflight < self.limit:
            self.inflight += 1
            self._held[key] = self._held.get(key, 0) + 1
            return
        if self.waiting >= self._queue_size:
            self._make_room(key)
        place = self._line_up(key)
        try:
            async with asyncio.timeout(self._queue_seconds):
                await asyncio.shield(place)
        except TimeoutError:
            if not place.done():
                self._step_out(key, place)
                raise self._full(f"and none became free within {self._queue_seconds * 1e3:g} ms") from None
            place.result()  # handed over, or put out, in the same moment
        except asyncio.CancelledError:
            # Whoever leaves while waiting gives up the turn, or the place that was handed over in the same moment.
            if not place.done():
                self._step_out(key, place)
            elif place.exception() is None:
                self.leave(key)
            raise

    def leave(self, key: str) -> None:
        """Gives a place back."""
        held = self._held[key] - 1
        if held:
            self._held[key] = held
        else:
            del self._held[key]
        if key in self._by_held:
            self._by_held.put_last(key, held)
            self._rank(key)
        if self.waiting and self.inflight <= self.limit:
            self._hand_over()
        else:
            self.inflight -= 1

    def _line_up(self, key: str) -> _Place:
        place: _Place = asyncio.get_running_loop().create_future()
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = OrderedDict()
            self._by_held.put_last(key, self._held.get(key, 0))
            self._by_share.put_last(key, 0)
        line[place] = None
        self.waiting += 1
        self._rank(key)
        return place

    def _step_out(self, key: str, place: _Place) -> None:
        """A waiting request waits no longer."""
        line = self._lines[key]
        del line[place]
        self.waiting -= 1
        if line:
            self._rank(key)
        else:
            del self._lines[key]
            self._by_held.drop(key)
            self._by_share.drop(key)

    def _hand_over(self) -> None:
        """A place, counted as in flight, goes to who comes next."""
        key = self._by_held.lowest()
        assert key is not None, "somebody waits"
        place = next(iter(self._lines[key]))
        self._held[key] = self._held.get(key, 0) + 1
        self._step_out(key, place)
        if key in self._by_held:
            self._by_held.put_last(key, self._held[key])
        place.set_result(None)

    def _make_room(self, key: str) -> None:
        """Puts the newest waiting request of the key with the largest share out, if that is larger than this key's
        would be. Raises ApiError 429 where it is not."""
        heaviest = self._by_share.lowest()
        if heaviest is None or self.waiting > self._queue_size:
            raise self._full("")
        if self._share(heaviest) <= self._share(key) + 1:
            raise self._full(f"and the queue of {self._queue_size} (server.queue_size) is full")
        place = next(reversed(self._lines[heaviest]))
        self._step_out(heaviest, place)
        place.set_exception(
            self._full(
                f"and the queue of {self._queue_size} (server.queue_size) is full; this key has more requests in them "
                "than others, so its newest gave way"
            )
        )

    def _share(self, key: str) -> int:
        """Places and waiting requests of a key."""
        line = self._lines.get(key)
        return self._held.get(key, 0) + (len(line) if line else 0)

    def _rank(self, key: str) -> None:
        """Its share has changed."""
        self._by_held.move(key, self._held.get(key, 0))
        self._by_share.move(key, -self._share(key))

    def _full(self, more: str) -> ApiError:
        return ApiError(
            429,
            "queue_full",
            f"All {self.limit} places for requests in flight (server.max_concurrent_requests) are taken"
            f"{more and ' '}{more}. Try again shortly.",
            retry_after=RETRY_SECONDS,
        )
