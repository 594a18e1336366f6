"""SLO: every request ends good or bad once for each objective, and a waiting one turns bad when its time passes.

TTFT. A stream is judged by its first token. One that waits is bad as soon as it has waited longer than the objective,
and is not counted again at its end. Requests that failed for the gateway's or the upstream's reasons (errors, timeouts,
no room) are bad; so are those whose clients left after a longer wait than the objective. An answer in one piece has no
TTFT: it is judged by the time from ingress to the engine's first token where the engine tells it, else it counts
neither way. TPOT. Whoever has one is judged by it; a stream cut by a failure is bad, and one cut by its client is when
its tokens were slower than the objective at that moment. Errors of clients, keys and their limits count neither way.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from heapq import heapify, heappop, heappush

from settings.schema import SloSettings
from tracing.clock import Clock
from tracing.ledger import Admitted, FirstToken, Ledger, Outcome, WorkerState
from tracing.stages import GATEWAY_STAGES, Timeline

GENERATING = frozenset({"chat", "completions", "responses", "messages"})
"""Surfaces whose requests have a first token."""
MAX_WAITING = 50_000
"""Requests that are followed at once; what is beyond is counted at its first token or end."""
FORGET_NS = 3600 * 10**9
"""A request whose end never came (its worker died) is forgotten after this."""

_FAILED = frozenset({Outcome.UPSTREAM_ERROR, Outcome.UPSTREAM_TIMEOUT, Outcome.GATEWAY_ERROR, Outcome.QUEUE_REJECTED})

Count = Callable[[str, str, bool], None]
"""(model, ttft or tpot, whether good)."""


class Objectives:
    """The objectives of each model; `default` stands for those that have none of their own."""

    def __init__(self, slo: Mapping[str, SloSettings]) -> None:
        self.replace(slo)

    def replace(self, slo: Mapping[str, SloSettings]) -> None:
        """Other objectives, for whatever is judged from now on."""
        self._slo = slo
        self._default = slo.get("default", SloSettings())

    def of(self, model: str) -> SloSettings:
        """The model's objectives."""
        return self._slo.get(model, self._default)


def first_token_seconds(timeline: Timeline) -> float | None:
    """Of an answer in one piece: ingress to the engine's first token, as far as it is told; transit of another host is
    left out."""
    if timeline.engine_ttft is None:
        return None
    stages = timeline.stages
    return sum(stages.get(name, 0.0) for name in (*GATEWAY_STAGES, "transit_out")) + timeline.engine_ttft


def ttft_is_good(ledger: Ledger, timeline: Timeline, objective: SloSettings) -> bool | None:
    """Whether a request that ended met its objective on TTFT; None: it counts neither way."""
    if ledger.surface not in GENERATING:
        return None
    limit = objective.ttft_ms / 1e3
    if timeline.ttft is not None:
        return timeline.ttft <= limit
    if ledger.outcome in _FAILED:
        return False
    if ledger.outcome not in (Outcome.OK, Outcome.CLIENT_CANCELLED):
        return None
    first = first_token_seconds(timeline) if not ledger.stream else None
    if first is not None:
        return first <= limit
    waited = ((ledger.client_gone or ledger.finish) - ledger.ingress) / 1e9
    if ledger.outcome is Outcome.CLIENT_CANCELLED:
        return False if waited > limit else None
    return waited <= limit if ledger.stream else None  # a stream that ended well without a token waited to its end


def tpot_is_good(ledger: Ledger, timeline: Timeline, objective: SloSettings) -> bool | None:
    """Whether a request that ended met its objective on TPOT; None: it counts neither way."""
    if ledger.surface not in GENERATING or not ledger.first_token:
        return None
    if ledger.outcome in _FAILED:
        return False
    limit = objective.tpot_ms / 1e3
    if ledger.outcome is Outcome.CLIENT_CANCELLED and ledger.choices == 1:
        left = ledger.client_gone or ledger.finish
        # The next token would have come at the earliest then, one gap after those that came.
        if (left - ledger.first_token) / 1e9 > limit * max(1, ledger.token_events, ledger.usage.output_tokens or 0):
            return False
    return None if timeline.tpot is None else timeline.tpot <= limit


class _Request:
    """A request on its way, whose end is to come."""

    __slots__ = ("counted", "ingress", "model", "stream", "worker")

    def __init__(self, record: Admitted) -> None:
        self.worker = record.worker
        self.model = record.model
        self.ingress = record.ingress
        self.stream = record.stream
        self.counted = False


class SloCounter:
    """Follows requests from the records of workers and calls `count`, once per request and objective.

    What is memory only is lost with the process: a new observer counts at their ends the requests that it finds under
    way, those too that were counted as waiting too long before.
    """

    def __init__(self, objectives: Objectives, clock: Clock, count: Count) -> None:
        self._objectives = objectives
        self._clock = clock
        self._count = count
        self._began_ns = clock.mono_ns()
        self._requests: OrderedDict[str, _Request] = OrderedDict()
        """By request id, the first admitted first."""
        self._admitted: set[tuple[int, int]] = set()
        """(worker, ingress) of them: how a worker names its oldest waiting request."""
        self._queued_too_long: OrderedDict[tuple[int, int], None] = OrderedDict()
        """Counted as bad while they waited for room, which is before there is a record of them."""
        self._due: list[tuple[int, str]] = []
        """Heap of (when the wait is too long, request id); requests that got their token leave it lazily."""

    def admitted(self, record: Admitted) -> None:
        """A request is on its way to an upstream."""
        if record.surface not in GENERATING or len(self._requests) >= MAX_WAITING:
            return
        request = self._requests[record.request_id] = _Request(record)
        self._admitted.add((request.worker, request.ingress))
        request.counted = (request.worker, request.ingress) in self._queued_too_long
        if request.stream and not request.counted:
            heappush(self._due, (request.ingress + self._limit_ns(request.model), record.request_id))

    def first_token(self, record: FirstToken) -> None:
        """TTFT is known. Of a request that is not followed it is counted at the end, where its ingress is known."""
        request = self._requests.get(record.request_id)
        if request is not None and not request.counted:
            request.counted = True
            self._count(record.model, "ttft", record.ttft_ns <= self._limit_ns(record.model))

    def worker(self, state: WorkerState) -> None:
        """Who waits longest at a worker: one without a record of its own waits for room."""
        now = self._clock.mono_ns()
        for model, ingress in state.waiting.items():
            key = (state.worker, ingress)
            if ingress < self._began_ns or key in self._admitted or key in self._queued_too_long:
                continue
            if now - ingress > self._limit_ns(model):
                self._queued_too_long[key] = None
                self._count(model, "ttft", False)
                if len(self._queued_too_long) > MAX_WAITING:
                    self._queued_too_long.popitem(last=False)

    def tick(self) -> None:
        """Counts those whose time has passed."""
        now = self._clock.mono_ns()
        while self._due and self._due[0][0] < now:
            request = self._requests.get(heappop(self._due)[1])
            if request is not None and not request.counted:
                request.counted = True
                self._count(request.model, "ttft", False)
        while self._requests and next(iter(self._requests.values())).ingress < now - FORGET_NS:
            self._forget(next(iter(self._requests)))
        if len(self._due) > 2 * len(self._requests) + 1000:
            self._due = [entry for entry in self._due if entry[1] in self._requests]
            heapify(self._due)

    def closed(self, ledger: Ledger, timeline: Timeline) -> None:
        """A request ended. Answers in one piece that may still be told their first token are counted by `told`."""
        request = self._forget(ledger.request_id)
        counted = self._queued_too_long.pop((ledger.worker, ledger.ingress), 0) is None
        objective = self._objectives.of(ledger.model)
        if not counted and not (request is not None and request.counted) and not _waits_to_be_told(ledger):
            self._count_known(ledger.model, "ttft", ttft_is_good(ledger, timeline, objective))
        self._count_known(ledger.model, "tpot", tpot_is_good(ledger, timeline, objective))

    def told(self, ledger: Ledger, timeline: Timeline) -> None:
        """The stages of a request are known as well as they ever will be."""
        if _waits_to_be_told(ledger):
            objective = self._objectives.of(ledger.model)
            self._count_known(ledger.model, "ttft", ttft_is_good(ledger, timeline, objective))

    def _forget(self, request_id: str) -> _Request | None:
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._admitted.discard((request.worker, request.ingress))
        return request

    def _count_known(self, model: str, slo: str, good: bool | None) -> None:
        if good is not None:
            self._count(model, slo, good)

    def _limit_ns(self, model: str) -> int:
        return round(self._objectives.of(model).ttft_ms * 1e6)


def _waits_to_be_told(ledger: Ledger) -> bool:
    return not ledger.stream and ledger.outcome in (Outcome.OK, Outcome.CLIENT_CANCELLED)
