"""Streams that have routed and have no first token yet: which of a model's has waited longest.

Followed request by request, by the records that workers send; what a worker says once a second of its oldest one puts
right what records cannot tell: those from before this observer, and those that a dead worker left behind.
"""

from __future__ import annotations

from collections.abc import Iterable

from tracing.ledger import Admitted, WorkerState

MAX_FOLLOWED = 50_000

_Place = tuple[int, str]
"""(worker, model)."""


class Waiting:
    """`admitted` and `answered` as it happens, `report` for each state of a worker, `oldest` at any time."""

    def __init__(self) -> None:
        self._ingress: dict[_Place, dict[str, int]] = {}
        """Request id -> ingress (monotonic ns), the first admitted first."""
        self._places: dict[str, _Place] = {}
        self._told: dict[_Place, int] = {}
        """Ingress of a request that a worker named and no record has."""

    def admitted(self, record: Admitted) -> None:
        """A request waits from now on."""
        if not record.stream or len(self._places) >= MAX_FOLLOWED:
            return
        place = (record.worker, record.model)
        self._places[record.request_id] = place
        self._ingress.setdefault(place, {})[record.request_id] = record.ingress
        if self._told.get(place) == record.ingress:
            del self._told[place]

    def answered(self, request_id: str) -> None:
        """It has its first token, or has ended."""
        place = self._places.pop(request_id, None)
        if place is None:
            return
        requests = self._ingress[place]
        del requests[request_id]
        if not requests:
            del self._ingress[place]

    def report(self, state: WorkerState, now_ns: int) -> None:
        """What the worker says: whoever is older than its oldest waits no more."""
        for place in [place for place in self._ingress if place[0] == state.worker]:
            oldest = state.waiting.get(place[1], now_ns)
            for request_id in [key for key, ingress in self._ingress[place].items() if ingress < oldest]:
                self.answered(request_id)
        self._told = {place: ingress for place, ingress in self._told.items() if place[0] != state.worker}
        for model, ingress in state.waiting.items():
            place = (state.worker, model)
            if ingress not in self._ingress.get(place, {}).values():
                self._told[place] = ingress

    def oldest(self, workers: Iterable[int]) -> dict[str, int]:
        """Model -> ingress of its oldest waiting request at these workers."""
        numbers = set(workers)
        found: dict[str, int] = {}
        firsts = ((place, next(iter(requests.values()))) for place, requests in self._ingress.items())
        for (worker, model), ingress in (*firsts, *self._told.items()):
            if worker in numbers:
                found[model] = min(ingress, found.get(model, ingress))
        return found
