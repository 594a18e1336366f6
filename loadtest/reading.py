"""What a run's figures say, in sentences: failures, where it is full, tails, where the time goes, what was busy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

import msgspec

from loadtest.compare import stage_name
from loadtest.digits import four_digits
from loadtest.health import FEWEST, TPOT_MOST, TTFT_GOOD, TTFT_MOST
from loadtest.server_side import LATE_STAGES

FULL_GAIN = 0.1
"""Throughput that grows by less than this share of what the load grew by: there is no more to be had."""
BUSY, IDLE = 0.9, 0.6
"""Share of the time in which the device worked: full from the first on, waiting for its host below the second."""
SHORT_OF_KV = 0.8

Mood = Literal["good", "watch", "bad", "plain"]


class Remark(msgspec.Struct, frozen=True):
    """One sentence, and whether it is good news."""

    mood: Mood
    text: str


def remarks(run: Mapping[str, Any]) -> list[Remark]:
    """Everything that a run's stages say, the most important first."""
    stages = run["stages"]
    found = [*_failures(stages)]
    if run["stopped"]:
        found.insert(0, Remark("bad", f"It ended before its time: {run['stopped']}."))
    found += _fullness(stages)
    for rule in run.get("health", ()):
        mood: Mood = {"pass": "good", "watch": "watch", "fail": "bad"}.get(rule["result"], "plain")  # type: ignore[assignment]
        found.append(Remark(mood, f"{rule['group']}: {rule['rule']}: {rule['result']} ({rule['seen']})."))
    if "health" not in run:
        for stage in stages:
            found += _spreads(stage)
    if stages:
        found += _where(max(stages, key=lambda stage: stage["rate"] or stage["concurrency"]))
    return found


def _failures(stages: Sequence[Mapping[str, Any]]) -> Iterator[Remark]:
    due, failed = sum(stage["requests"] for stage in stages), sum(stage["errors"] for stage in stages)
    if not due:
        yield Remark("bad", "No request was due in the part that counts.")
    elif failed:
        yield Remark("bad", f"{failed} of {due} requests failed.")
    else:
        yield Remark("good", f"All {due} requests succeeded.")
    for stage in stages:
        if goodput := stage["goodput"]:
            wanted = ", ".join(f"{name.upper()} {limit:g} ms" for name, limit in goodput["slo_ms"].items())
            share = goodput["share"]
            mood: Mood = "plain" if share is None else "good" if share >= 0.99 else "watch" if share >= 0.9 else "bad"
            told = "" if share is None else f", {share:.1%} of those due"
            yield Remark(
                mood, f"{stage_name(dict(stage))}: {four_digits(goodput['rps'])} requests/s{told} met {wanted}."
            )


def _fullness(stages: Sequence[Mapping[str, Any]]) -> Iterator[Remark]:
    """Between neighbours under growing load: whether more load still gives more tokens."""
    for before, after in pairwise(stages):
        loads = [stage["rate"] or stage["concurrency"] for stage in (before, after)]
        if bool(before["rate"]) != bool(after["rate"]) or loads[1] <= loads[0] or not before["tps"] or not after["tps"]:
            continue
        more_load, more_tokens = loads[1] / loads[0] - 1, after["tps"] / before["tps"] - 1
        names = f"From {stage_name(dict(before))} to {stage_name(dict(after))}"
        ttft = [stage["ttft_ms"]["p50"] for stage in (before, after)]
        waits = f", TTFT P50 went from {four_digits(ttft[0])} to {four_digits(ttft[1])} ms" if all(ttft) else ""
        is_full = more_tokens < FULL_GAIN * more_load
        verdict = ": it is full; more load only waits" if is_full else ""
        yield Remark(
            "watch" if is_full else "plain", f"{names}, tokens/s changed by {more_tokens:+.0%}{waits}{verdict}."
        )


def _spreads(stage: Mapping[str, Any]) -> Iterator[Remark]:
    """P99 by P50, as the health rules of a sampling have it."""
    name = stage_name(dict(stage))
    for figure, good, most in (("ttft", TTFT_GOOD, TTFT_MOST), ("tpot", TPOT_MOST, TPOT_MOST)):
        spread = stage[f"{figure}_ms"]
        if spread["count"] < FEWEST or not spread["p50"]:
            continue
        ratio = spread["p99"] / spread["p50"]
        if ratio > good:
            mood: Mood = "bad" if ratio > most else "watch"
            goes = f"; {stage['tail']['verdict']}" if figure == "ttft" and stage["tail"] else ""
            yield Remark(mood, f"{name}: P99 {figure.upper()} is {ratio:.1f} times P50{goes}.")


def _where(stage: Mapping[str, Any]) -> Iterator[Remark]:
    """Under the most load: the largest part of TTFT by the server's account, and what the engine's page said."""
    name, told = stage_name(dict(stage)), stage["server_stages_ms"] or {}
    means = {part: spread["mean"] for part, spread in told.items() if part not in LATE_STAGES and spread["mean"]}
    if means and stage["ttft_ms"]["count"]:
        largest = max(means, key=lambda part: means[part])
        share = means[largest] / sum(means.values())
        yield Remark("plain", f"{name}: {share:.0%} of the mean TTFT is {largest} ({four_digits(means[largest])} ms).")
    engine = stage["engine"] or {}
    busy = engine.get("gpu_utilization", engine.get("busy"))
    if busy is not None:
        what = "the GPU" if "gpu_utilization" in engine else "the device"
        if busy >= BUSY:
            yield Remark("good", f"{name}: {what} was busy {busy:.0%} of the time.")
        elif busy < IDLE and not stage.get("group"):  # one request after another leaves any device idle
            yield Remark("watch", f"{name}: {what} was busy only {busy:.0%} of the time; the engine's advice says why.")
    if engine.get("kv_usage", 0) > SHORT_OF_KV:
        yield Remark("watch", f"{name}: {engine['kv_usage']:.0%} of the KV cache was used; enlarge it first.")
    if stage["client"]["was_bottleneck"]:
        yield Remark("bad", f"{name}: the client itself was the bottleneck; its figures say more of itself.")
