"""The queue: who waits for a slot, in order of arrival; those that were put out of the batch come before all others."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator

from backend_engine.core.messages import Gauges
from backend_engine.core.request import Request

log = logging.getLogger(__name__)


class WaitingLine:
    """Not bounded here: whoever adds to it does that."""

    def __init__(self, warn_ms: float) -> None:
        """A wait longer than `warn_ms` is logged, once."""
        self._warn_ms = warn_ms
        self._arrived: dict[str, Request] = {}
        self._put_out: list[Request] = []
        self._not_warned: deque[Request] = deque()

    def __len__(self) -> int:
        return len(self._arrived) + len(self._put_out)

    def __iter__(self) -> Iterator[Request]:
        """From the one whose turn is next; the line may change meanwhile."""
        yield from tuple(self._put_out)
        yield from tuple(self._arrived.values())

    @property
    def has_only_arrivals(self) -> bool:
        """Somebody waits, and nobody who was in the batch already."""
        return bool(self._arrived) and not self._put_out

    def add(self, request: Request) -> None:
        """To the end."""
        self._arrived[request.id] = request
        self._not_warned.append(request)

    def put_back(self, request: Request) -> None:
        """One that was in the batch: before all that never were, in its old order."""
        self._put_out.append(request)
        self._put_out.sort(key=lambda waiter: waiter.number)

    def remove(self, request: Request) -> None:
        """It is admitted, or waits no more; nothing happens if it did not wait."""
        self._arrived.pop(request.id, None)
        if request in self._put_out:
            self._put_out.remove(request)

    def warn_of_long_waits(self, now_ns: int, gauges: Callable[[], Gauges], slots: int) -> None:
        """One line for each request that has waited longer than scheduler.queue_warn_ms, as soon as it has."""
        while self._not_warned:
            request = self._not_warned[0]
            is_waiting = request.id in self._arrived
            waited_ms = (now_ns - request.queued_ns) / 1e6
            if is_waiting and waited_ms <= self._warn_ms:
                return
            self._not_warned.popleft()
            if is_waiting:
                state = gauges()
                log.warning(
                    "request %s has waited %.0f ms in the engine's queue (scheduler.queue_warn_ms = %g): "
                    "%d running in %d slots, %d waiting, %d of %d KV pages in use",
                    request.id,
                    waited_ms,
                    self._warn_ms,
                    state.running,
                    slots,
                    state.waiting,
                    state.kv_used,
                    state.kv_pages,
                )
