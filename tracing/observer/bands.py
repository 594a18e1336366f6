"""Bands: which part of its model's TTFT distribution a request fell into, and where the time of each part went.

The distribution is of the last hour (a sketch for each SLOT_NS, relative error 2 %), of streams that had a first token.
A stream that never had one is in p99+ when it waited longer than that; else nobody knows which band it would have been
in, and it is in none. Answers in one piece have no TTFT and are in none. A request is compared with those before it,
and the first MIN_REQUESTS of a model with nobody.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from tracing.clock import Clock
from tracing.observer.labels import Bounded
from tracing.observer.rows import Row
from tracing.observer.sketch import Sketch

BANDS = ("p0-50", "p50-95", "p95-99", "p99+")
EDGES = (0.5, 0.95, 0.99)
MIN_REQUESTS = 30
SLOT_NS = 300 * 10**9
SLOTS = 12
EDGES_AGE_NS = 10**9
"""Quantiles of a model are looked up in its sketch at most this often."""
MAX_MODELS = 64

CountRequest = Callable[[str, str], None]
"""(model, band)."""
AddSeconds = Callable[[str, str, str, float], None]
"""(model, band, stage, seconds)."""


class _Distribution:
    """TTFT of one model over the last SLOTS * SLOT_NS."""

    def __init__(self) -> None:
        self._slots: deque[tuple[int, Sketch]] = deque(maxlen=SLOTS)
        self._whole = Sketch()
        self._total = 0
        self._edges: list[float] | None = None
        self._edges_at_ns = 0

    def add(self, seconds: float, now_ns: int) -> None:
        """One request's TTFT."""
        number = now_ns // SLOT_NS
        if not self._slots or self._slots[-1][0] != number:
            self._slots.append((number, Sketch()))
            self._leave_out_before(number - SLOTS + 1)
        self._slots[-1][1].add(seconds)
        self._whole.add(seconds)
        self._total += 1

    def edges(self, now_ns: int) -> list[float] | None:
        """Seconds at EDGES, or None while there are too few requests."""
        number = now_ns // SLOT_NS
        if self._slots and self._slots[0][0] <= number - SLOTS:
            self._leave_out_before(number - SLOTS + 1)
        if self._total < MIN_REQUESTS:
            return None
        if self._edges is None or now_ns - self._edges_at_ns >= EDGES_AGE_NS:
            self._edges = self._whole.quantiles(EDGES)
            self._edges_at_ns = now_ns
        return self._edges

    def _leave_out_before(self, oldest: int) -> None:
        while self._slots and self._slots[0][0] < oldest:
            self._slots.popleft()
        self._whole = Sketch()
        for _, sketch in self._slots:
            self._whole.merge(sketch)
        self._total = self._whole.total
        self._edges = None


class Bands:
    """`told` is called once for each request, when its stages are known as well as they ever will be."""

    def __init__(self, clock: Clock, count: CountRequest, add_seconds: AddSeconds) -> None:
        self._clock = clock
        self._count = count
        self._add_seconds = add_seconds
        self._models = Bounded(MAX_MODELS)
        self._distributions: dict[str, _Distribution] = {}

    def told(self, row: Row) -> None:
        """Puts the request into its band."""
        ledger, timeline = row.ledger, row.timeline
        if not ledger.stream or not ledger.routed:
            return
        (model,) = self._models.keep(ledger.model)
        distribution = self._distributions.get(model)
        if distribution is None:
            distribution = self._distributions[model] = _Distribution()
        now = self._clock.mono_ns()
        edges = distribution.edges(now)
        waited = timeline.ttft if timeline.ttft is not None else timeline.e2e
        if timeline.ttft is not None:
            distribution.add(timeline.ttft, now)
        if edges is None or waited is None or (timeline.ttft is None and waited <= edges[-1]):
            return
        band = BANDS[sum(waited > edge for edge in edges)]
        self._count(model, band)
        for stage, seconds in timeline.stages.items():
            self._spend(model, band, stage, seconds)
        self._spend(model, band, "unaccounted", timeline.unaccounted or 0.0)

    def _spend(self, model: str, band: str, stage: str, seconds: float) -> None:
        if seconds > 0:  # a counter cannot fall; negative intervals are counted as timing anomalies
            self._add_seconds(model, band, stage, seconds)
