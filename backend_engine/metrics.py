"""The engine's own metrics, fed from the core's messages and from the end of each request."""

from __future__ import annotations

import logging
from collections import deque
from typing import cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info
from prometheus_client.exposition import choose_encoder

from backend_engine.adviser import Adviser
from backend_engine.core.messages import Outputs, Ready
from backend_engine.nvml import GpuWatch, in_words, watch_gpus
from backend_engine.record import CLIENT_CANCELLED, OK, RequestRecord
from settings.schema import Settings
from tracing.clock import Clock
from tracing.instruments import build
from tracing.metrics import ENGINE

log = logging.getLogger(__name__)

BUSY_WINDOW_NS = 10 * 10**9
_BUCKET_NS = 10**8
_PREFIX = "tokenline_engine_"


_TOTALS = {
    "prefix_cache_queries_total": "prefix_queries_total",
    "prefix_cache_hits_total": "prefix_hits_total",
    "prefix_cache_evictions_total": "evictions_total",
    "num_preemptions_total": "preemptions_total",
    "oom_total": "ooms_total",
}
"""Metric -> the core's own total."""


class Total:
    """A counter that follows a total which the core tells again and again."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._seen = 0

    def grow_to(self, total: int) -> None:
        """Counts what came since the last time."""
        if total > self._seen:
            self._counter.inc(total - self._seen)
            self._seen = total


class BusyShare:
    """Share of the last 10 s that the device spent in steps, to a tenth of a second; holds at most 101 numbers."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._buckets: deque[list[int]] = deque()  # [tenth of a second, forward ns in it]

    def add(self, forward_ns: int) -> None:
        """A step of this length has just ended."""
        tenth = self._clock.mono_ns() // _BUCKET_NS
        if self._buckets and self._buckets[-1][0] == tenth:
            self._buckets[-1][1] += forward_ns
        else:
            self._buckets.append([tenth, forward_ns])
            self._forget(tenth)

    def share(self) -> float:
        """From 0 to 1."""
        self._forget(self._clock.mono_ns() // _BUCKET_NS)
        return min(1.0, sum(forward_ns for _, forward_ns in self._buckets) / BUSY_WINDOW_NS)

    def _forget(self, tenth: int) -> None:
        while self._buckets and self._buckets[0][0] <= tenth - BUSY_WINDOW_NS // _BUCKET_NS:
            self._buckets.popleft()


def observe_often(histogram: Histogram, amount: float, times: int) -> None:
    """`histogram.observe(amount)` this many times, at the price of one. The library has no such call, so this reaches
    for its parts; a test holds it against the plain way."""
    histogram._sum.inc(amount * times)
    for bound, bucket in zip(histogram._upper_bounds, histogram._buckets, strict=True):
        if amount <= bound:
            bucket.inc(times)
            return


class EngineMetrics:
    """The series of one model. Every method is called on the event loop's thread."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        self.registry = CollectorRegistry()
        self._settings = settings
        self._clock = clock
        self._model = settings.engine_model_name
        self._all = build(ENGINE, self.registry)
        self._busy = BusyShare(clock)
        self._running = self._gauge("num_requests_running")
        self._waiting = self._gauge("num_requests_waiting")
        self._kv_usage = self._gauge("kv_cache_usage_ratio")
        self._gauge("busy_ratio").set_function(self._busy.share)
        self._prompt_tokens = self._counter("prompt_tokens_total")
        self._generation_tokens = self._counter("generation_tokens_total")
        self._forward = self._counter("forward_seconds_total")
        self._ttft = self._histogram("time_to_first_token_seconds")
        self._between = self._histogram("inter_token_latency_seconds")
        self._queue = self._histogram("request_queue_time_seconds")
        self._prefill = self._histogram("request_prefill_time_seconds")
        self._decode = self._histogram("request_decode_time_seconds")
        self._e2e = self._histogram("e2e_request_latency_seconds")
        self._gap = self._histogram("token_gap_seconds")
        self._batch = self._histogram("batch_size")
        self._batched_tokens = self._histogram("batched_tokens")
        self._schedule = self._histogram("schedule_seconds")
        self._slot_kernel = self._histogram("slot_kernel_seconds")
        self._totals = {name: Total(self._counter(name)) for name in _TOTALS}
        self._tokenize = self._histogram("tokenize_seconds")
        self._detokenize = self._histogram("detokenize_seconds")
        self._new_tokens = 0
        self._new_intervals: dict[float, int] = {}
        """Since the last message of the core: time between two tokens in ns -> how many had it."""
        self._rates = Rates(clock.mono_ns())
        self.adviser = Adviser(settings, clock, self._advise)
        self._gpus: GpuWatch | None = None

    def _advise(self, name: str, is_given: bool) -> None:
        cast(Gauge, self._all[_PREFIX + "advice"]).labels(self._model, name).set(is_given)

    def _gauge(self, name: str) -> Gauge:
        return cast(Gauge, self._all[_PREFIX + name]).labels(self._model)

    def _counter(self, name: str) -> Counter:
        return cast(Counter, self._all[_PREFIX + name]).labels(self._model)

    def _histogram(self, name: str) -> Histogram:
        return cast(Histogram, self._all[_PREFIX + name]).labels(self._model)

    # -- what happens ------------------------------------------------------------------------------------------------

    def describe(self, ready: Ready) -> None:
        """What serves, once the core has loaded it."""
        self.adviser.describe(ready)
        if ready.device == "cuda" and self._gpus is None:
            self._gpus = watch_gpus(self.registry)
        facts: dict[str, str | bool] = {
            "device": ready.device,
            "dtype": ready.dtype,
            "simulated": ready.device == "simulated",
            "async_scheduling": ready.async_scheduling,
            "slot_reuse": ready.slot_reuse,
            "chunked_prefill": self._settings.scheduler.enable_chunked_prefill,
        }
        info = cast(Info, self._all[_PREFIX + "info"]).labels(self._model)
        info.info({name: str(value).lower() if isinstance(value, bool) else value for name, value in facts.items()})

    def core(self, message: Outputs) -> None:
        """Steps and state of one turn of the core's loop, after the tokens that came with it."""
        self._publish_tokens()
        self.adviser.core(message)
        for step in message.steps:
            self._forward.inc(step.forward_ns / 1e9)
            self._busy.add(step.forward_ns)
            self._batch.observe(step.batch)
            self._batched_tokens.observe(step.tokens)
            self._schedule.observe(step.schedule_ns / 1e9)
            self._slot_kernel.observe(step.slot_kernel_ns / 1e9)
            if step.gap_ns is not None:
                self._gap.observe(step.gap_ns / 1e9)
                self._rates.add_gap(step.gap_ns)
        gauges = message.gauges
        for name, field in _TOTALS.items():
            self._totals[name].grow_to(getattr(gauges, field))
        self._running.set(gauges.running)
        self._waiting.set(gauges.waiting)
        self._kv_usage.set(gauges.kv_used / gauges.kv_pages if gauges.kv_pages else 0.0)
        self._rates.state = (gauges.running, gauges.waiting, gauges.kv_used / (gauges.kv_pages or 1))

    def first_token(self, record: RequestRecord) -> None:
        """A request's first token was sampled."""
        scheduled = record.scheduled
        if scheduled is None or record.queued_ns is None:
            return
        self.adviser.first_token(
            scheduled.prefill_end_ns - record.received_ns, scheduled.prefill_end_ns - scheduled.scheduled_ns
        )
        self._prompt_tokens.inc(record.prompt_tokens or 0)
        self._ttft.observe((scheduled.prefill_end_ns - record.received_ns) / 1e9)
        self._queue.observe((scheduled.scheduled_ns - record.queued_ns) / 1e9)
        self._prefill.observe((scheduled.prefill_end_ns - scheduled.scheduled_ns) / 1e9)

    def tokens(self, count: int, last_token_ns: int | None, step_end_ns: int) -> None:
        """Tokens of one request in one step, the one before them sampled at `last_token_ns`; published by `core`."""
        between_ns = None if last_token_ns is None else (step_end_ns - last_token_ns) / count
        self._new_tokens += count
        self._rates.tokens += count
        self.adviser.tokens(count, between_ns)
        if between_ns is not None:
            self._new_intervals[between_ns] = self._new_intervals.get(between_ns, 0) + count

    def _publish_tokens(self) -> None:
        """Once a message: in a full batch most requests waited equally long, and an observation costs as much as
        making a token's event."""
        self._generation_tokens.inc(self._new_tokens)
        for between_ns, count in self._new_intervals.items():
            observe_often(self._between, between_ns / 1e9, count)
        self._new_tokens = 0
        self._new_intervals.clear()

    def tokenized(self, spent_ns: int) -> None:
        """Time that one prompt took to become tokens, without waiting."""
        self._tokenize.observe(spent_ns / 1e9)

    def detokenized(self, spent_ns: int) -> None:
        """Host time that one step's tokens took to become text."""
        self._detokenize.observe(spent_ns / 1e9)

    def closed(self, record: RequestRecord) -> None:
        """A request that had reached the core is over."""
        reason = {OK: record.finish_reason or "error", CLIENT_CANCELLED: "abort"}.get(record.outcome, "error")
        cast(Counter, self._all[_PREFIX + "request_success_total"]).labels(self._model, reason).inc()
        if record.outcome != OK or record.scheduled is None or record.last_token_ns is None:
            return
        self._decode.observe((record.last_token_ns - record.scheduled.prefill_end_ns) / 1e9)
        self._e2e.observe((record.last_token_ns - record.received_ns) / 1e9)

    # -- who asks ----------------------------------------------------------------------------------------------------

    def page(self, accept: str) -> tuple[bytes, str]:
        """The metrics page and its content type, as Prometheus text or OpenMetrics by the Accept header."""
        encoder, content_type = choose_encoder(accept)
        return encoder(self.registry), content_type

    def log_rates(self) -> None:
        """One line on what happened since the last one."""
        tps, gap_ms = self._rates.take(self._clock.mono_ns())
        running, waiting, kv_usage = self._rates.state
        gap = "none" if gap_ms is None else f"{gap_ms:.2f} ms"
        utilisation = f", {self._utilisation()}" if self._settings.logging.log_gpu_util else ""
        log.info(
            "%.1f tokens/s, %d running, %d waiting, KV %.0f %%, mean token gap %s%s",
            tps,
            running,
            waiting,
            100 * kv_usage,
            gap,
            utilisation,
        )

    def _utilisation(self) -> str:
        """Share of time in steps, and what the GPUs say themselves."""
        said = in_words(self._gpus.latest) if self._gpus is not None else ""
        busy = f"device busy {self._busy.share():.0%}"
        return f"{busy}, {said}" if said else busy

    def close(self) -> None:
        """Nobody asks any more."""
        if self._gpus is not None:
            self._gpus.close()


class Rates:
    """Counts between two lines of the log."""

    def __init__(self, now_ns: int) -> None:
        self.tokens = 0
        self.state = (0, 0, 0.0)
        """Running, waiting, share of KV pages in use."""
        self._gap_ns = 0
        self._gaps = 0
        self._since_ns = now_ns

    def add_gap(self, gap_ns: int) -> None:
        """One token gap."""
        self._gap_ns += gap_ns
        self._gaps += 1

    def take(self, now_ns: int) -> tuple[float, float | None]:
        """Tokens per second and mean token gap in ms since the last call; starts anew."""
        seconds = (now_ns - self._since_ns) / 1e9
        tps = self.tokens / seconds if seconds > 0 else 0.0
        gap_ms = self._gap_ns / self._gaps / 1e6 if self._gaps else None
        self.tokens = self._gap_ns = self._gaps = 0
        self._since_ns = now_ns
        return tps, gap_ms
