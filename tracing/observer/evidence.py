"""Evidence about one request: its figures and stages beside those of its class. No judgement here, only arithmetic.

Times are seconds. `excess` of a stage is what it took beyond the median of its class; without a baseline, all it took.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import msgspec

from protocol.timings import EngineState, Timings
from settings.schema import ENGINE_UPSTREAM, Settings
from tracing.ledger import Ledger, Outcome
from tracing.observer.baseline import Baseline, Quantiles, computed_tokens, tpot_of
from tracing.observer.rows import Row
from tracing.stages import ENGINE_STAGES

SLOW_RATIO = 1.5
"""Slow: at least this many times the median, or beyond P95 and at least TAIL_RATIO times the median."""
TAIL_RATIO = 1.1
MIN_EXCESS = 0.005
"""Seconds over the median that nobody calls slow, whatever the ratio."""
AFTER_STAGES = ("streaming", "closing")
_UPSTREAM_STAGES = (*ENGINE_STAGES, "transit")


class Excess(NamedTuple):
    """A stage, how much longer than usual it took, and its share of all excess."""

    stage: str
    seconds: float
    share: float


class Figure(NamedTuple):
    """A figure of the request beside the same of its class."""

    name: str
    value: float
    usual: Quantiles
    weight: float = 1.0
    """What one unit of it costs the request: TPOT is paid for every token."""

    @property
    def is_slow(self) -> bool:
        """Whether it stands out of its class."""
        p50, p95, _ = self.usual
        if (self.value - p50) * self.weight < MIN_EXCESS:
            return False
        return self.value >= SLOW_RATIO * p50 or (self.value > p95 and self.value >= TAIL_RATIO * p50)


class EngineSettingsNow(msgspec.Struct, frozen=True):
    """What the settings say of the engine that served: those of the co-located one; of another nothing is known."""

    is_ours: bool
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    chunked_prefill: bool | None

    @staticmethod
    def of(settings: Settings, upstream: str) -> EngineSettingsNow:
        """For a request that this upstream served."""
        if upstream != ENGINE_UPSTREAM or not settings.has_engine:
            return EngineSettingsNow(False, None, None, None)
        scheduler = settings.scheduler
        return EngineSettingsNow(
            True, scheduler.max_num_seqs, scheduler.max_num_batched_tokens, scheduler.enable_chunked_prefill
        )


class Evidence:
    """One request, its class's baseline (which may be no baseline yet), and the engine's settings."""

    def __init__(self, row: Row, baseline: Baseline, engine_settings: EngineSettingsNow) -> None:
        self.row = row
        self.baseline = baseline
        self.engine_settings = engine_settings

    @property
    def ledger(self) -> Ledger:
        """The request's own."""
        return self.row.ledger

    @property
    def timings(self) -> Timings | None:
        """What the engine reported."""
        return self.row.ledger.timings

    @property
    def engine(self) -> EngineState | None:
        """The engine when the request was scheduled."""
        return self.timings.engine if self.timings is not None else None

    @cached_property
    def stages(self) -> dict[str, float]:
        """Every stage to the request's end, `unaccounted` with them; they sum to E2E."""
        timeline = self.row.timeline
        found = timeline.stages | {name: timeline.after[name] for name in AFTER_STAGES if name in timeline.after}
        if timeline.unaccounted is not None:
            found["unaccounted"] = timeline.unaccounted
        return found

    def usual(self, name: str) -> float | None:
        """The class's median; None: there is no baseline, or the class never had it."""
        if not self.baseline.is_enough:
            return None
        found = self.baseline.median(name)
        if found is None and name == "upstream_wait":
            # Served without a word by an upstream that reports as a rule: its parts together are the usual wait.
            parts = [self.baseline.median(stage) for stage in _UPSTREAM_STAGES]
            found = sum(part for part in parts if part is not None)
        return found

    def over(self, name: str) -> float:
        """How much longer than usual the stage took; never negative."""
        return max(0.0, self.stages.get(name, 0.0) - (self.usual(name) or 0.0))

    @cached_property
    def excess(self) -> tuple[Excess, ...]:
        """Every stage that took longer than usual, the worst first."""
        over = {stage: self.over(stage) for stage in self.stages}
        total = sum(over.values())
        ordered = sorted(over.items(), key=lambda one: -one[1])
        return tuple(Excess(stage, seconds, seconds / total) for stage, seconds in ordered if seconds > 0)

    @cached_property
    def figures(self) -> tuple[Figure, ...]:
        """What can be compared: TTFT, TPOT and E2E, or how long a client waited that left before its first token."""
        timeline, cancelled = self.row.timeline, self.ledger.outcome is Outcome.CLIENT_CANCELLED
        if cancelled and self.ledger.stream and timeline.ttft is None:
            return self._figures(("ttft", "wait", timeline.e2e, 1.0))
        tokens = max((self.ledger.usage.output_tokens or self.ledger.token_events) - 1, 0)
        return self._figures(
            ("ttft", "ttft", timeline.ttft, 1.0),
            ("tpot", "tpot", tpot_of(self.row), float(tokens)),
            ("e2e", "e2e", None if cancelled and self.ledger.stream else timeline.e2e, 1.0),
        )

    def _figures(self, *wanted: tuple[str, str, float | None, float]) -> tuple[Figure, ...]:
        found = []
        for compared_with, name, value, weight in wanted:
            usual = self.baseline.of(compared_with) if self.baseline.is_enough else None
            if value is not None and usual is not None:
                found.append(Figure(name, value, usual, weight))
        return tuple(found)

    @cached_property
    def slow(self) -> frozenset[str]:
        """Names of the figures that stand out."""
        return frozenset(figure.name for figure in self.figures if figure.is_slow)

    @cached_property
    def suspects(self) -> dict[str, float]:
        """Stages that the slow figures are made of, with the seconds they are to blame for; as many as there are.

        Without a baseline every stage is a suspect. With one, TTFT alone leads to the stages before the first token,
        and TPOT to the streaming, which counts for its tokens' slowness even when it was short.
        """
        found = {stage: self.over(stage) for stage in self.stages}
        if self.slow and not self.slow & {"e2e", "wait"}:
            late = (*AFTER_STAGES, "engine_decode")
            found = {
                stage: seconds
                for stage, seconds in found.items()
                if ("ttft" in self.slow and stage not in late) or ("tpot" in self.slow and stage in late)
            }
        decode = "streaming" if "streaming" in self.stages else "engine_decode"
        if "tpot" in self.slow and decode in found:
            found[decode] = max(found[decode], self.slower_tokens)
        return found

    @cached_property
    def slower_tokens(self) -> float:
        """Seconds that the output took because each token took longer than usual."""
        return self._over_tpot * max(self.output_tokens - 1, 0)

    @cached_property
    def more_tokens(self) -> float:
        """Seconds that the output took because it had more tokens than usual."""
        usual, tpot = self.usual("output_tokens"), self.usual("tpot")
        return max(0.0, self.output_tokens - usual) * tpot if usual is not None and tpot is not None else 0.0

    @cached_property
    def _over_tpot(self) -> float:
        tpot, usual = tpot_of(self.row), self.usual("tpot")
        return max(0.0, tpot - usual) if tpot is not None and usual is not None else 0.0

    @property
    def output_tokens(self) -> int:
        """By usage, else by events."""
        tokens = self.ledger.usage.output_tokens
        return self.ledger.token_events if tokens is None else tokens

    @property
    def computed_tokens(self) -> int | None:
        """Prompt tokens that were not found in the cache."""
        return computed_tokens(self.ledger)

    @property
    def cached_share(self) -> float | None:
        """Share of the prompt that the cache had; None: unknown."""
        prompt, computed = self.ledger.usage.input_tokens, self.computed_tokens
        return None if not prompt or computed is None else min(1.0, max(0.0, 1 - computed / prompt))

    @cached_property
    def lag(self) -> float:
        """Event-loop lag beyond the usual."""
        return max(0.0, self.ledger.loop_lag_ns / 1e9 - (self.usual("loop_lag") or 0.0))

    @cached_property
    def backpressure(self) -> float:
        """Time beyond the usual in which the client had not taken what was written."""
        return max(0.0, self.ledger.backpressure_ns / 1e9 - (self.usual("backpressure") or 0.0))
