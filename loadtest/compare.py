"""Two runs side by side: what differs, how sure that is, and which of the server's stages moved."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from loadtest.bootstrap import block_mean, interval, resampled, worth
from loadtest.figures import quantile, rounded
from loadtest.server_side import LATE_STAGES, STAGE_ORDER

TRIPLE = ("base_url", "key_fingerprint", "model")
"""What stays fixed while one searches: runs that differ in it are of two different things."""
SMALLEST_SHARE = 0.02
"""A difference below this is within what the client itself may be off, however sure it is."""
FEWEST = 5
QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
LATENCIES = {
    "ttft": ("scheduled_us", "first_token_us"),
    "ttft_from_sent": ("sent_us", "first_token_us"),
    "e2e": ("scheduled_us", "end_us"),
}
MORE_IS_BETTER = ("tps", "rps")


class Difference(msgspec.Struct, frozen=True):
    """One figure of one stage: B against A. `low` and `high` bound B - A; None where there is too little to say."""

    stage: str
    metric: str
    a: float
    b: float
    low: float | None
    high: float | None
    whole: float | None = None
    """For a stage of the server: the time that it is a part of."""

    @property
    def change(self) -> float:
        return self.b - self.a

    @property
    def share(self) -> float | None:
        return self.change / self.a if self.a else None

    @property
    def server_stage(self) -> str | None:
        """The stage of the timeline that it is of; None: a figure of the client's."""
        name = self.metric.removesuffix("_p50")
        return name if name in STAGE_ORDER else None

    @property
    def is_sure(self) -> bool:
        """The interval does not hold 0, and the difference is not too small to matter."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high and not self.is_small

    @property
    def is_small(self) -> bool:
        """Too small to matter. A stage that doubles is small where it is a small part of the whole."""
        whole = self.a if self.whole is None else self.whole
        return bool(whole) and abs(self.change / whole) < SMALLEST_SHARE

    @property
    def verdict(self) -> str:
        if self.low is None:
            return "too little to say"
        if not self.is_sure:
            return "no difference" if self.is_small else "not sure"
        if self.server_stage:
            return "longer" if self.change > 0 else "shorter"
        return "better" if (self.change > 0) == (self.metric in MORE_IS_BETTER) else "worse"


def foreign(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Where two runs are not of the same base_url, key and model."""
    return [f"{name}: {a[name]} and {b[name]}" for name in TRIPLE if a[name] != b[name]]


def other_settings(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Settings that differ: the load or the prompts were not the same."""
    found = []
    for section, keys in a["settings"].items():
        for key, value in keys.items():
            other = b["settings"].get(section, {}).get(key)
            if other != value and (section, key) not in (("api", "base_url"), ("api", "api_key_env"), ("api", "model")):
                found.append(f"{section}.{key}: {value} and {other}")
    if a["mix"] != b["mix"]:
        found.append("the mix of prompts")
    return found


def compare(a: dict[str, Any], b: dict[str, Any], rng: random.Random) -> list[Difference]:
    """All differences of the stages that both runs have."""
    found = []
    for name, at_a, at_b in pairs(a, b):
        sides = (timed_samples(a, at_a), timed_samples(b, at_b))
        values_a, values_b = ({m: sorted(v for _, v in t) for m, t in side.items()} for side in sides)
        # Requests that were answered together share their luck: blocks are as long as an answer takes.
        blocks = [round(1e3 * quantile(v["e2e"], 0.5)) if v["e2e"] else 1 for v in (values_a, values_b)]
        for metric, first in values_a.items():
            second = values_b.get(metric)
            if not first or not second:
                continue
            for label in _labels(metric):
                of_a, of_b = (
                    worth(side[metric], values, QUANTILES[label], block)
                    for side, values, block in zip(sides, (first, second), blocks, strict=True)
                )
                found.append(quantile_difference(name, metric, first, second, label, rng, (of_a, of_b)))
        found = [_as_part(difference, values_a) for difference in found]
        found += _rates(name, a, b, at_a, at_b, rng)
    return found


def pairs(a: dict[str, Any], b: dict[str, Any]) -> list[tuple[str, int, int]]:
    """Stages under the same load: their name, and their places in both runs."""
    found = []
    free = list(range(len(b["stages"])))
    for at_a, stage in enumerate(a["stages"]):
        at_b = next((at for at in free if stage_name(b["stages"][at]) == stage_name(stage)), None)
        if at_b is not None:
            free.remove(at_b)
            found.append((stage_name(stage), at_a, at_b))
    return found


def stage_name(stage: dict[str, Any]) -> str:
    """A stage's load in words."""
    if group := stage.get("group"):
        return str(group)
    return f"{stage['rate']:g} requests/s" if stage["rate"] else f"{stage['concurrency']} in flight"


def samples(run: dict[str, Any], place: int) -> dict[str, list[float]]:
    """Each metric's values of the requests that count in a stage, in order, in ms."""
    return {metric: sorted(value for _, value in found) for metric, found in timed_samples(run, place).items()}


def timed_samples(run: dict[str, Any], place: int) -> dict[str, list[tuple[int, float]]]:
    """The same with the instant at which each was due, in µs."""
    requests = run["requests"]
    counted = [at for at in range(len(requests["error"])) if _counts(run, place, at) and requests["error"][at] is None]
    due = requests["scheduled_us"]
    found: dict[str, list[tuple[int, float]]] = {}
    for metric, (begin, end) in LATENCIES.items():
        times = ((at, requests[begin][at], requests[end][at]) for at in counted)
        found[metric] = [(due[at], (b - a) / 1e3) for at, a, b in times if a is not None and b is not None]
    found["tpot"] = list(_tpots(requests, counted))
    for stage in STAGE_ORDER:
        if column := requests.get(f"{stage}_ms"):
            found[stage] = [(due[at], value) for at in counted if (value := column[at]) is not None]
    return found


def _tpots(requests: dict[str, list[Any]], counted: Sequence[int]) -> Iterator[tuple[int, float]]:
    for at in counted:
        first, last, tokens = (requests[name][at] for name in ("first_token_us", "last_token_us", "output_tokens"))
        if first is not None and last is not None and tokens and tokens > 1 and last > first:
            yield requests["scheduled_us"][at], (last - first) / 1e3 / (tokens - 1)


def _counts(run: dict[str, Any], place: int, at: int) -> bool:
    stage = run["stages"][place]
    scheduled = run["requests"]["scheduled_us"][at]
    return scheduled is not None and stage["counted_from_us"] <= scheduled < stage["counted_to_us"]


def _labels(metric: str) -> tuple[str, ...]:
    return ("p50",) if metric in STAGE_ORDER else tuple(QUANTILES)


def _as_part(difference: Difference, values: dict[str, list[float]]) -> Difference:
    stage = difference.server_stage
    if difference.whole is not None or stage is None:
        return difference
    whole = values["e2e"] if stage in LATE_STAGES else values["ttft"] or values["e2e"]
    return msgspec.structs.replace(difference, whole=quantile(whole, 0.5) if whole else None)


def quantile_difference(
    stage: str,
    metric: str,
    a: Sequence[float],
    b: Sequence[float],
    label: str,
    rng: random.Random,
    counts: tuple[float, float] | None = None,
) -> Difference:
    """One quantile (a key of QUANTILES) of two samples in order, with the interval of b - a.

    `counts`: how many independent requests each is worth; None: as many as it has.
    """
    share = QUANTILES[label]
    of_a, of_b = counts or (None, None)
    bounds = None
    if min(len(a), len(b)) >= FEWEST:
        bounds = interval(lambda: resampled(b, share, rng, of_b) - resampled(a, share, rng, of_a))
    return _difference(stage, f"{metric}_{label}", quantile(a, share), quantile(b, share), bounds)


def _rates(
    name: str, a: dict[str, Any], b: dict[str, Any], at_a: int, at_b: int, rng: random.Random
) -> Iterator[Difference]:
    for metric in ("tps", "rps"):
        first, second = a["stages"][at_a][metric], b["stages"][at_b][metric]
        if first is None or second is None:
            continue
        bins_a, bins_b = (seconds_of(run, place, metric) for run, place in ((a, at_a), (b, at_b)))
        bounds = None
        if min(len(bins_a), len(bins_b)) >= FEWEST:
            bounds = interval(lambda x=bins_a, y=bins_b: block_mean(y, rng) - block_mean(x, rng))  # type: ignore[misc]
        yield _difference(name, metric, first, second, bounds)


def seconds_of(run: dict[str, Any], place: int, metric: str) -> list[float]:
    """Tokens or requests that came in each whole second of what counts."""
    stage = run["stages"][place]
    begin, end = stage["counted_from_us"], stage["counted_to_us"]
    if metric == "tps":
        tps = run.get("timeline", {}).get("tps", [])
        return [float(v) for second, v in enumerate(tps) if second * 1e6 >= begin and (second + 1) * 1e6 <= end]
    bins = [0.0] * int((end - begin) // 1_000_000)
    requests = run["requests"]
    for ended, error in zip(requests["end_us"], requests["error"], strict=True):
        if ended is not None and error is None and 0 <= (second := int((ended - begin) // 1_000_000)) < len(bins):
            bins[second] += 1
    return bins


def _difference(stage: str, metric: str, a: float, b: float, bounds: tuple[float, float] | None) -> Difference:
    low, high = bounds if bounds else (None, None)
    shown = (None if low is None else rounded(low), None if high is None else rounded(high))
    return Difference(stage, metric, rounded(a), rounded(b), *shown)


def moved(differences: Sequence[Difference]) -> dict[str, Difference]:
    """For each stage of load: the server's stage whose median moved most, where one surely did.

    `streaming` gives way to the engine's decode, which lies inside it, where that has moved as well.
    """
    found: dict[str, dict[str, Difference]] = {}
    for difference in differences:
        if difference.server_stage and difference.is_sure:
            found.setdefault(difference.stage, {})[difference.server_stage] = difference
    for sure in found.values():
        if "engine_decode" in sure:
            sure.pop("streaming", None)
    return {stage: max(sure.values(), key=lambda one: abs(one.change)) for stage, sure in found.items()}
