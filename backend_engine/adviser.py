"""The adviser: counts a window of work, judges it when there is enough of it, and says what is new."""

from __future__ import annotations

import logging
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from backend_engine.advice import NAMES, Advice, Facts, Usual, Window, advice_on
from backend_engine.core.messages import Outputs, Ready
from settings.schema import Settings
from tracing.clock import Clock

log = logging.getLogger(__name__)

CHECK_SECONDS = 15.0
MIN_STEPS = 50
STALE_SECONDS = 120.0
"""A window that has not seen MIN_STEPS by then is no load worth judging; it is dropped."""
HISTORY = 20
"""Windows that make up what is usual."""
MIN_HISTORY = 3
MAX_SAMPLES = 4096


class WindowCounter:
    """Counts since the last window; holds at most MAX_SAMPLES numbers of a kind, the latest."""

    def __init__(self, now_ns: int) -> None:
        self._totals = (0, 0, 0)
        self._token_gaps_ms: deque[float] = deque(maxlen=MAX_SAMPLES)
        self._ttfts_ms: deque[float] = deque(maxlen=MAX_SAMPLES)
        self._prefills_ms: deque[float] = deque(maxlen=MAX_SAMPLES)
        self._restart(now_ns)

    def _restart(self, now_ns: int) -> None:
        self._since_ns = now_ns
        self.steps = 0
        self._forward_ns = self._gap_ns = 0
        self._prefill_steps = self._budget_steps = 0
        self._tokens = self._token_gaps = self._requests = 0
        self._reports = self._full_reports = 0
        self._kv_peak = 0.0
        self._before = self._totals
        for samples in (self._token_gaps_ms, self._ttfts_ms, self._prefills_ms):
            samples.clear()

    def seconds(self, now_ns: int) -> float:
        """Since the last window ended."""
        return (now_ns - self._since_ns) / 1e9

    def core(self, message: Outputs, facts: Facts) -> None:
        """Steps and state of one turn of the core."""
        for step in message.steps:
            self.steps += 1
            self._forward_ns += step.forward_ns
            self._gap_ns += step.gap_ns or 0
            if step.tokens > step.batch:  # a decoding sequence has one token in a step
                self._prefill_steps += 1
                self._budget_steps += step.tokens >= facts.max_num_batched_tokens
        gauges = message.gauges
        if message.steps:
            self._reports += 1
            self._full_reports += gauges.running >= facts.max_num_seqs and gauges.waiting > 0
        self._kv_peak = max(self._kv_peak, gauges.kv_used / (gauges.kv_pages or 1))
        self._totals = (gauges.prefix_queries_total, gauges.prefix_hits_total, gauges.evictions_total)

    def first_token(self, ttft_ns: int, prefill_ns: int) -> None:
        """A request's first token: since it was received, and since it was scheduled."""
        self._requests += 1
        self._ttfts_ms.append(ttft_ns / 1e6)
        self._prefills_ms.append(prefill_ns / 1e6)

    def tokens(self, count: int, gap_ns: float | None) -> None:
        """New tokens of a request; `gap_ns` of time for each, None for its first."""
        self._tokens += count
        if gap_ns is not None:
            self._token_gaps += count
            self._token_gaps_ms.append(gap_ns / 1e6)

    def take(self, now_ns: int) -> Window:
        """The window so far; counting starts anew."""
        gaps = sorted(self._token_gaps_ms)
        queries, hits, evictions = (now - before for now, before in zip(self._totals, self._before, strict=True))
        window = Window(
            seconds=self.seconds(now_ns),
            steps=self.steps,
            forward_ms=self._forward_ns / 1e6,
            gap_ms=self._gap_ns / 1e6,
            prefill_steps=self._prefill_steps,
            budget_steps=self._budget_steps,
            output_tokens=self._tokens,
            reports=self._reports,
            full_reports=self._full_reports,
            kv_peak_ratio=self._kv_peak,
            token_gaps=self._token_gaps,
            tpot_p50_ms=_share(gaps, 0.5),
            tpot_p99_ms=_share(gaps, 0.99),
            requests=self._requests,
            ttft_p50_ms=_median(self._ttfts_ms),
            prefill_p50_ms=_median(self._prefills_ms),
            prefix_queries=queries,
            prefix_hits=hits,
            evictions=evictions,
        )
        self._restart(now_ns)
        return window


class Adviser:
    """Owned by the frontend's metrics; `publish(name, is_given)` sets the gauge of one kind of advice."""

    def __init__(self, settings: Settings, clock: Clock, publish: Callable[[str, bool], None]) -> None:
        self._settings = settings
        self._clock = clock
        self._publish = publish
        self._facts: Facts | None = None
        self._counter = WindowCounter(clock.mono_ns())
        self._history: deque[Window] = deque(maxlen=HISTORY)
        self._judged: Window | None = None
        self._judged_s: int | None = None
        self.given: tuple[Advice, ...] = ()

    # -- what happens ------------------------------------------------------------------------------------------------

    def describe(self, ready: Ready) -> None:
        """What serves; before that there is nothing to advise on."""
        self._facts = facts_of(self._settings, ready)

    def core(self, message: Outputs) -> None:
        """One turn of the core."""
        if self._facts is not None:
            self._counter.core(message, self._facts)

    def first_token(self, ttft_ns: int, prefill_ns: int) -> None:
        """See WindowCounter."""
        self._counter.first_token(ttft_ns, prefill_ns)

    def tokens(self, count: int, gap_ns: float | None) -> None:
        """See WindowCounter."""
        self._counter.tokens(count, gap_ns)

    # -- judging -----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Every CHECK_SECONDS: judges the window once it has MIN_STEPS; what was advised stands until then."""
        now_ns = self._clock.mono_ns()
        if self._facts is None:
            return
        if self._counter.steps < MIN_STEPS:
            if self._counter.seconds(now_ns) >= STALE_SECONDS:
                self._counter.take(now_ns)
            return
        window = self._counter.take(now_ns)
        given = advice_on(window, usual_of(self._history), self._facts)
        self._say_what_is_new(given)
        names = {advice.name for advice in given}
        for name in NAMES:
            self._publish(name, name in names)
        self.given, self._judged = given, window
        self._judged_s = self._clock.wall_ns() // 10**9
        self._history.append(window)

    def _say_what_is_new(self, given: Sequence[Advice]) -> None:
        known = {advice.name for advice in self.given}
        for advice in given:
            if advice.name not in known:
                log.warning("advice: %s", advice.text)

    def report(self) -> dict[str, Any]:
        """For GET /advice."""
        return {
            "advice": [msgspec.to_builtins(advice) for advice in self.given],
            "checked_at": self._judged_s,
            "window": msgspec.to_builtins(self._judged),
            "usual": msgspec.to_builtins(usual_of(self._history)),
        }


def facts_of(settings: Settings, ready: Ready) -> Facts:
    """What runs. A switch that was asked for counts as on, since there is nothing left to set."""
    switches, scheduler = settings.token_interval, settings.scheduler
    return Facts(
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        enable_chunked_prefill=scheduler.enable_chunked_prefill,
        async_scheduling=switches.async_scheduling or ready.async_scheduling,
        overlap_token_interval=switches.overlap_token_interval,
        slot_reuse=switches.slot_reuse or ready.slot_reuse,
        is_cpu=ready.device != "cuda",
        kv_pages=ready.kv_pages,
        most_kv_pages=scheduler.max_num_seqs * -(-ready.max_model_len // ready.page_size),
    )


def usual_of(windows: Sequence[Window]) -> Usual:
    """Medians over earlier windows, where at least MIN_HISTORY of them know the number."""
    return Usual(
        tps=_usual([window.tps for window in windows]),
        ttft_ms=_usual([window.ttft_p50_ms for window in windows]),
        prefill_ms=_usual([window.prefill_p50_ms for window in windows]),
        hit_ratio=_usual([window.hit_ratio for window in windows]),
    )


def _usual(found: Sequence[float | None]) -> float | None:
    known = [value for value in found if value is not None]
    return statistics.median(known) if len(known) >= MIN_HISTORY else None


def _median(samples: Sequence[float]) -> float | None:
    return statistics.median(samples) if samples else None


def _share(ordered: Sequence[float], share: float) -> float | None:
    """The sample below which `share` of them lie."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None
