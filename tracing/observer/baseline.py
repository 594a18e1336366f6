"""Baselines: what is usual for a class of requests, so that a slow one can be told and its slow stage named.

A class is (model, upstream, prompt-size class, stream or whole answer). Its distributions are sketches in sub-windows
of WINDOW_SECONDS, of which the newest WINDOWS count; older ones are forgotten. Only requests that ended well are added.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from tracing.ledger import Ledger, Outcome
from tracing.metrics import prompt_size_class
from tracing.observer.rows import Row
from tracing.observer.sketch import Sketch

WINDOW_SECONDS = 4 * 3600
WINDOWS = 6
MAX_CLASSES = 128
"""The class that was added to longest ago leaves first."""
ENOUGH_REQUESTS = 30
"""Fewer in a class are no baseline."""
UNKNOWN_SIZE = "unknown"
RETRIES = "failed_attempts"
"""The one stage that is absent because it took no time, not because nobody measured it."""
FIGURES = (
    "ttft",
    "tpot",
    "e2e",
    "prompt_tokens",
    "computed_tokens",
    "output_tokens",
    "mean_batch",
    "step_gap",
    "loop_lag",
    "backpressure",
    "client_rtt",
)
"""Kept beside the stages. Times in seconds; `computed_tokens`: prompt tokens not found in the cache; `step_gap`: token
gap of one decode step; `tpot` of a whole answer is the engine's decode by output token."""


class ClassKey(NamedTuple):
    """What a request is compared with."""

    model: str
    upstream: str
    size: str
    stream: bool


class Quantiles(NamedTuple):
    """Of one stage or figure."""

    p50: float
    p95: float
    p99: float


class Window(msgspec.Struct, array_like=True):
    """One sub-window of a class; `number` counts them since 1970."""

    number: int
    requests: int = 0
    sketches: dict[str, Sketch] = {}


Classes = list[tuple[ClassKey, list[Window]]]


class Baseline:
    """What a class was like when it was asked for; a copy that nobody changes."""

    def __init__(self, requests: int, sketches: Mapping[str, Sketch]) -> None:
        self.requests = requests
        self._sketches = sketches
        if RETRIES in sketches:
            sketches[RETRIES].zeros += requests - sketches[RETRIES].total
        self._quantiles: dict[str, Quantiles] = {}

    @property
    def is_enough(self) -> bool:
        """Whether it may be compared with."""
        return self.requests >= ENOUGH_REQUESTS

    def names(self) -> list[str]:
        """Stages and figures of which anything is known."""
        return list(self._sketches)

    def stages(self) -> list[str]:
        """The stages among them, `unaccounted` included."""
        return [name for name in self._sketches if name not in FIGURES]

    def of(self, name: str) -> Quantiles | None:
        """P50, P95 and P99 of a stage or figure; None: it was never seen."""
        if name not in self._quantiles:
            sketch = self._sketches.get(name)
            if sketch is None:
                return None
            self._quantiles[name] = Quantiles(*sketch.quantiles((0.5, 0.95, 0.99)))
        return self._quantiles[name]

    def median(self, name: str) -> float | None:
        """P50 of the requests that had it; None: never seen."""
        found = self.of(name)
        return None if found is None else found.p50

    def share_below(self, name: str, value: float) -> float | None:
        """Share of the class's requests with a smaller value."""
        sketch = self._sketches.get(name)
        return None if sketch is None else sketch.share_below(value)


class Baselines:
    """Every class's baseline. Added to from one thread, read and encoded from any."""

    def __init__(self, max_classes: int = MAX_CLASSES) -> None:
        self._max_classes = max_classes
        self._lock = threading.Lock()
        self._classes: OrderedDict[ClassKey, list[Window]] = OrderedDict()
        """Windows oldest first; at most WINDOWS. The class that was added to last comes last."""
        self.changes = 0
        """How many requests were added: whether there is anything new to save."""

    def add(self, row: Row) -> None:
        """A request whose stages are known as well as they ever will be."""
        ledger = row.ledger
        if ledger.outcome is not Outcome.OK or not ledger.attempts:
            return
        key, number = class_of(ledger), _window_number(ledger.wall_ns)
        values = values_of(row)
        with self._lock:
            window = self._window(key, number)
            if window is None:
                return
            window.requests += 1
            sketches = window.sketches
            for name, value in values.items():
                sketch = sketches.get(name)
                if sketch is None:
                    sketch = sketches[name] = Sketch()
                sketch.add(value)
            self.changes += 1

    def of(self, key: ClassKey, now_ns: int) -> Baseline:
        """The class's baseline at this wall time; an empty one where nothing is known."""
        return self._merged([key], now_ns)

    def of_all_sizes(self, key: ClassKey, now_ns: int) -> Baseline:
        """The baseline of the model at the upstream, prompts of every size together."""
        with self._lock:
            keys = [other for other in self._classes if other._replace(size=key.size) == key]
        return self._merged(keys, now_ns)

    def encoded(self) -> msgspec.Raw:
        """Everything as MessagePack of `Classes`, to be saved."""
        with self._lock:
            return msgspec.Raw(msgspec.msgpack.encode(list(self._classes.items())))

    def restore(self, classes: Classes) -> None:
        """What `encoded` gave before a restart. Before the first `add`."""
        with self._lock:
            self._classes.update(classes)
            while len(self._classes) > self._max_classes:
                self._classes.popitem(last=False)

    def _window(self, key: ClassKey, number: int) -> Window | None:
        """The window to add to; None for a time that is forgotten already."""
        windows = self._classes.get(key)
        if windows is None:
            windows = self._classes[key] = []
            if len(self._classes) > self._max_classes:
                self._classes.popitem(last=False)
        else:
            self._classes.move_to_end(key)
        if not windows or number > windows[-1].number:
            windows.append(Window(number))
            del windows[:-WINDOWS]
        return next((window for window in reversed(windows) if window.number == number), None)

    def _merged(self, keys: Iterable[ClassKey], now_ns: int) -> Baseline:
        oldest = _window_number(now_ns) - WINDOWS + 1
        requests, merged = 0, dict[str, Sketch]()
        with self._lock:
            for key in keys:
                for window in self._classes.get(key, ()):
                    if window.number < oldest:
                        continue
                    requests += window.requests
                    for name, sketch in window.sketches.items():
                        merged.setdefault(name, Sketch()).merge(sketch)
        return Baseline(requests, merged)


def class_of(ledger: Ledger) -> ClassKey:
    """The class that a request belongs to."""
    tokens = ledger.usage.input_tokens
    size = UNKNOWN_SIZE if tokens is None else prompt_size_class(tokens)
    return ClassKey(ledger.model, ledger.upstream, size, ledger.stream)


def values_of(row: Row) -> dict[str, float]:
    """What is added of one request: its stages, those after the first token, and FIGURES; unknown ones are absent."""
    ledger, timeline = row.ledger, row.timeline
    usage, timings = ledger.usage, ledger.timings
    values = dict(timeline.stages)
    for name in ("streaming", "closing"):
        if name in timeline.after:
            values[name] = timeline.after[name]
    found = {
        "unaccounted": timeline.unaccounted,
        "ttft": timeline.ttft,
        "tpot": tpot_of(row),
        "e2e": timeline.e2e,
        "prompt_tokens": usage.input_tokens,
        "computed_tokens": computed_tokens(ledger),
        "output_tokens": usage.output_tokens,
        "mean_batch": timings.mean_batch if timings else None,
        "step_gap": step_gap(ledger),
        "client_rtt": ledger.client_rtt_ns / 1e9 or None,
        "loop_lag": ledger.loop_lag_ns / 1e9,
        "backpressure": ledger.backpressure_ns / 1e9,
    }
    values |= {name: value for name, value in found.items() if value is not None}
    return values


def tpot_of(row: Row) -> float | None:
    """TPOT of a stream; of a whole answer the engine's decode by output token, in seconds."""
    if row.timeline.tpot is not None:
        return row.timeline.tpot
    decode, tokens = row.timeline.stages.get("engine_decode"), row.ledger.usage.output_tokens
    return decode / (tokens - 1) if decode is not None and tokens is not None and tokens > 1 else None


def computed_tokens(ledger: Ledger) -> int | None:
    """Prompt tokens that were not found in the prefix cache; None: the upstream doesn't say."""
    if ledger.timings is not None and ledger.timings.prompt_n is not None:
        return ledger.timings.prompt_n
    usage = ledger.usage
    if usage.input_tokens is None or usage.cached_tokens is None:
        return None
    return usage.input_tokens - usage.cached_tokens


def step_gap(ledger: Ledger) -> float | None:
    """Token gap of one decode step, in seconds; None: unknown."""
    timings = ledger.timings
    if timings is None or timings.token_gap_ms is None or not timings.steps:
        return None
    return timings.token_gap_ms / 1e3 / timings.steps


def _window_number(wall_ns: int) -> int:
    return wall_ns // (WINDOW_SECONDS * 1_000_000_000)
