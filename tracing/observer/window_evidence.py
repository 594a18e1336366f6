"""What slowness goes with: time (how busy it was) or the length of requests (prompt and cache)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tracing.observer.baseline import computed_tokens
from tracing.observer.ranks import chance_correlation, rank_correlation
from tracing.observer.rows import Row
from tracing.observer.window_rows import Crowd, Line

KINDS = {
    "time": ("engine_waiting", "engine_running", "concurrency", "load"),
    "length": ("prompt_tokens", "computed_tokens", "uncached_share"),
}
MIN_CORRELATION = 0.5
"""Between being slow and having a larger value; below it, slowness doesn't go with it whatever the numbers of rows."""
MIN_RATIO = 1.5
"""Of the means: a difference that is certain but small explains nothing."""

Features = Mapping[str, Callable[[int], float | None]]
"""Name -> value of a row by its id; None: not known of that row."""


def features_of(whole: Mapping[int, Row], crowds: Mapping[int, Crowd]) -> Features:
    """What slowness may go with."""

    def engine(name: str) -> Callable[[int], float | None]:
        def value(number: int) -> float | None:
            timings = whole[number].ledger.timings
            return getattr(timings.engine, name) if timings is not None and timings.engine is not None else None

        return value

    def uncached(number: int) -> float | None:
        ledger = whole[number].ledger
        computed, prompt = computed_tokens(ledger), ledger.usage.input_tokens
        return None if computed is None or not prompt else computed / prompt

    return {
        "engine_waiting": engine("waiting"),
        "engine_running": engine("running"),
        "concurrency": lambda number: crowds[number].concurrency,
        "load": lambda number: crowds[number].load,
        "prompt_tokens": lambda number: whole[number].ledger.usage.input_tokens,
        "computed_tokens": lambda number: computed_tokens(whole[number].ledger),
        "uncached_share": uncached,
    }


def correlations(tail: Sequence[Line], middle: Sequence[Line], features: Features) -> dict[str, Any]:
    """By kind (time, length) and feature: whether being in the tail goes with larger values. Too few: absent."""
    found: dict[str, Any] = {kind: {} for kind in KINDS}
    for kind, names in KINDS.items():
        for name in names:
            slow = [value for line in tail if (value := features[name](line.id)) is not None]
            usual = [value for line in middle if (value := features[name](line.id)) is not None]
            if len(slow) * 2 < len(tail) or len(usual) * 2 < len(middle) or not slow or not usual:
                continue
            chance = chance_correlation(len(slow), len(usual))
            if chance >= 1:
                continue  # so few that nothing could be told from chance
            correlation = rank_correlation(slow, usual)
            slow_mean, usual_mean = sum(slow) / len(slow), sum(usual) / len(usual)
            stands_out = correlation >= max(MIN_CORRELATION, chance) and slow_mean >= MIN_RATIO * usual_mean
            found[kind][name] = {
                "rank_correlation": round(correlation, 4),
                "is_significant": stands_out,
                "slowest_mean": round(slow_mean, 4),
                "median_half_mean": round(usual_mean, 4),
            }
    return found


def goes_with(found: Mapping[str, Mapping[str, Any]]) -> str:
    """time, length, both, neither; unknown where one side wasn't measured and the other doesn't explain it."""
    goes = {
        kind: any(one["is_significant"] for one in found[kind].values()) if found.get(kind) else None for kind in KINDS
    }
    if all(goes.values()):
        return "both"
    for kind, is_so in goes.items():
        if is_so:
            return kind
    return "unknown" if None in goes.values() else "neither"
