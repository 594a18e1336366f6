"""A run against live traffic: requests of the same prompt sizes side by side, as the gateway saw both."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from loadtest.alike import BATCH, COMPANY, PROMPT, Condition, alike
from loadtest.compare import Difference, quantile_difference
from loadtest.server_side import COLUMNS, STAGE_ORDER, ServerSide
from tracing.metrics import prompt_size_class

ENOUGH = 20
"""Requests of a size on both sides, below which that size is not compared."""
FIGURES: Mapping[str, Callable[[ServerSide], float | None]] = {
    "ttft": lambda one: one.ttft_ms,
    "tpot": lambda one: one.tpot_ms,
    "e2e": lambda one: one.e2e_ms,
}
TRAFFIC: Mapping[str, Callable[[ServerSide], float | None]] = {
    "prompt_tokens": lambda one: one.prompt_tokens,
    "computed_tokens": lambda one: one.computed_tokens,
    "output_tokens": lambda one: one.output_tokens,
    "engine_running": lambda one: one.engine_running,
    "engine_waiting": lambda one: one.engine_waiting,
    "mean_batch": lambda one: one.mean_batch,
}
LIKE_FOR_LIKE: Mapping[str, tuple[Callable[[ServerSide], float | None], tuple[Condition, ...]]] = {
    "engine_prefill": (lambda one: one.stages_ms.get("engine_prefill"), (PROMPT, COMPANY)),
    "tpot": (lambda one: one.tpot_ms, (BATCH,)),
}
"""What the engine takes for the same work in the same company."""
INSIDE_STREAMING = ("preempted", "client_backpressure", "engine_decode")
"""Of a stream: parts of `streaming`, never beside it in a sum. engine_decode of a whole answer is a stage."""


class SizeFound(msgspec.Struct, frozen=True):
    """One prompt-size class."""

    size: str
    a: list[ServerSide]
    live: list[ServerSide]
    differences: list[Difference]
    """Latencies and traffic at P50 and P95, the stages at P50; those that both sides measured."""
    like_for_like: list[Difference]
    """At P50, of pairs under the same conditions. Absent: too few pairs, or nothing measured."""
    mean_change_ms: dict[str, float]
    """Of each stage: they sum to the change of the mean E2E."""

    def difference(self, metric: str) -> Difference | None:
        """One of `differences` by its name."""
        return next((one for one in self.differences if one.metric == metric), None)


def baseline_of(run: Mapping[str, Any]) -> list[ServerSide]:
    """The requests of a run that counted and ended well, as the gateway saw them; empty where it was not joined."""
    requests = run["requests"]
    if "server_upstream" not in requests:
        return []
    stages = [name for name in STAGE_ORDER if f"{name}_ms" in requests]
    found = []
    for at, upstream in enumerate(requests["server_upstream"]):
        scheduled, tokens = requests["scheduled_us"][at], requests["prompt_tokens"][at]
        counted = any(s["counted_from_us"] <= (scheduled or 0) < s["counted_to_us"] for s in run["stages"])
        if upstream is None or requests["error"][at] is not None or not counted:
            continue
        told = {name: ms for name in stages if (ms := requests[f"{name}_ms"][at]) is not None}
        values = {name: requests[f"server_{name}"][at] for name in COLUMNS}
        size = "unknown" if tokens is None else prompt_size_class(tokens)
        output = requests["output_tokens"][at]
        found.append(ServerSide(size=size, stages_ms=told, prompt_tokens=tokens, output_tokens=output, **values))
    return found


def compare_sizes(a: Sequence[ServerSide], live: Sequence[ServerSide], rng: random.Random) -> list[SizeFound]:
    """Every prompt size that there are enough requests of on both sides."""
    found = []
    for size in sorted({one.size for one in a}):
        of_a, of_live = ([one for one in side if one.size == size] for side in (a, live))
        if min(len(of_a), len(of_live)) >= ENOUGH:
            found.append(_compare(size, of_a, of_live, rng))
    return found


def _compare(size: str, a: list[ServerSide], live: list[ServerSide], rng: random.Random) -> SizeFound:
    stages = {name: _stage(name) for name in STAGE_ORDER}
    differences = []
    for name, value in {**FIGURES, **TRAFFIC, "client_rtt": lambda one: one.client_rtt_ms, **stages}.items():
        first, second = _known(a, value), _known(live, value)
        if min(len(first), len(second)) >= ENOUGH:
            labels = ("p50",) if name in stages else ("p50", "p95")
            differences += [quantile_difference(size, name, first, second, label, rng) for label in labels]
    like = []
    for name, (value, conditions) in LIKE_FOR_LIKE.items():
        first, second = alike(a, live, value, conditions, rng)
        if len(first) >= ENOUGH:
            like.append(quantile_difference(size, name, sorted(first), sorted(second), "p50", rng))
    return SizeFound(size, a, live, differences, like, _mean_changes(a, live))


def _stage(name: str) -> Callable[[ServerSide], float | None]:
    return lambda one: one.stages_ms.get(name)


def _known(side: Sequence[ServerSide], value: Callable[[ServerSide], float | None]) -> list[float]:
    return sorted(found for one in side if (found := value(one)) is not None)


def _mean_changes(a: Sequence[ServerSide], live: Sequence[ServerSide]) -> dict[str, float]:
    """A stage that a request did not have took it no time."""
    means = []
    for side in (a, live):
        sums: dict[str, float] = {}
        for one in side:
            inside = INSIDE_STREAMING if "streaming" in one.stages_ms else ()
            for name, ms in one.stages_ms.items():
                if name not in inside and name != "client_link":
                    sums[name] = sums.get(name, 0.0) + ms
        means.append({name: total / len(side) for name, total in sums.items()})
    before, after = means
    return {
        name: after.get(name, 0.0) - before.get(name, 0.0) for name in STAGE_ORDER if name in before or name in after
    }
