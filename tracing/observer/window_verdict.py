"""The verdict of a window: what the slowest 1 % have that the median half have not, and what slowness goes with.

Percentiles of stages are never added up: stages are compared by their means inside the two groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import ceil
from typing import Any

from fastapi.concurrency import run_in_threadpool

from tracing.metrics import PROMPT_SIZES
from tracing.observer.baseline import UNKNOWN_SIZE, class_of
from tracing.observer.core import Observer
from tracing.observer.evidence import SLOW_RATIO
from tracing.observer.ranks import quantile
from tracing.observer.rows import Row
from tracing.observer.texts import Language, write
from tracing.observer.verdict import Judge, Judged
from tracing.observer.window_evidence import correlations, features_of, goes_with
from tracing.observer.window_rows import Line, WindowRows, slowest
from tracing.observer.window_wording import window_story
from tracing.observer.windows import window_ns

SLOWEST_SHARE = 0.01
MEDIAN_HALF = (0.25, 0.75)
ENOUGH = 30
"""Requests below which nothing is said about what slowness goes with."""
TAIL_SHARE = 0.1
MAX_TAIL = 500
"""For what slowness goes with: the requests that stand out (see SLOW_RATIO), a tenth of all and this many at most."""
CALM_TAIL = 20
"""Where none stands out, this many of the slowest instead."""
HEALTHY_TTFT, UNHEALTHY_TTFT = 3.0, 5.0
"""P99 of TTFT by its P50: up to the first is healthy, above the second is not."""
UNHEALTHY_TPOT = 10.0
ROUNDING_MS = 1e-3
"""A difference of means below this is no time."""
_SIZES = (*(f"le_{bound}" for bound in PROMPT_SIZES), f"gt_{PROMPT_SIZES[-1]}", UNKNOWN_SIZE)


async def window_verdict(observer: Observer, window: str, model: str | None, language: Language) -> dict[str, Any]:
    """The window's JSON. Raises ValueError for a window that isn't one."""
    since_ns = observer.clock.wall_ns() - window_ns(window)
    rows = WindowRows(observer.settings.traces_path, since_ns=since_ns, model=model)

    def work() -> dict[str, Any]:
        observer.store.flush(2)
        rows.read()
        return judge_window(rows, observer.judge(), language, window)

    return await run_in_threadpool(work)


def judge_window(rows: WindowRows, judge: Judge, language: Language, window: str) -> dict[str, Any]:
    """What the rows of a window come to."""
    lines = [line for line in rows.lines if line.outcome == "ok"]
    by = "ttft_ms" if any(line.ttft_ms is not None for line in lines) else "e2e_ms"
    ordered = slowest(lines, by)
    slow, middle = _groups(ordered)
    sample = rows.sample()
    tail = _tail(ordered, by)
    whole = rows.whole({line.id: line for line in (*sample, *slow, *tail)}.values())
    sampled = {line.id for line in sample} & whole.keys()
    middle = [line for line in middle if line.id in sampled]

    asked = slow or [line for line in sample if line.outcome != "ok"]  # where nothing ended well: why not
    judged = [judge.judge(whole[line.id]) for line in asked if line.id in whole]
    difference = _difference(_means(slow, whole), _means(middle, whole))
    found = correlations(tail, middle, features_of(whole, rows.crowds())) if len(ordered) >= ENOUGH else {}
    view: dict[str, Any] = {
        "window": window,
        "model": rows.model,
        "requests": rows.total,
        "sampled": {
            "rows_read": len(rows.lines),
            "rows_read_whole": len(whole),
            "is_complete": len(whole) == rows.total,
        },
        "outcomes": dict(Counter(line.outcome for line in rows.lines).most_common()),
        "by": by.removesuffix("_ms"),
        "ttft_ms": _distribution(line.ttft_ms for line in lines),
        "tpot_ms": _distribution(line.tpot_ms for line in lines),
        "e2e_ms": _distribution(line.e2e_ms for line in lines),
        "prompt_tokens": _distribution(whole[number].ledger.usage.input_tokens for number in sampled),
        "sizes": _sizes([line for line in lines if line.id in sampled], whole, by),
        "slowest": _group_view(slow, whole, by),
        "median_half": _group_view(middle, whole, by),
        "difference": difference,
        "goes_with": goes_with(found),
        "evidence": {"tail": len(tail), "median_half": len(middle), **found},
        "causes": _causes(judged),
    }
    view["health"] = _health(view)
    view["verdict"] = _verdict(view, judged, judge, language, window)
    return view


def _groups(ordered: Sequence[Line]) -> tuple[list[Line], list[Line]]:
    """The slowest 1 % (one at least), and the half around the median without them. Slowest first."""
    count = len(ordered)
    slow = list(ordered[: ceil(count * SLOWEST_SHARE)])
    low, high = MEDIAN_HALF
    return slow, list(ordered[max(len(slow), int(count * (1 - high))) : ceil(count * (1 - low))])


def _tail(ordered: Sequence[Line], by: str) -> list[Line]:
    """The slow ones that are asked what slowness goes with: groups diluted with ordinary requests would not tell."""
    if not ordered:
        return []
    times = [getattr(line, by) for line in ordered]
    outliers = sum(time >= SLOW_RATIO * times[len(times) // 2] for time in times)
    return list(ordered[: min(outliers or CALM_TAIL, MAX_TAIL, int(len(ordered) * TAIL_SHARE))])


def _means(lines: Iterable[Line], whole: Mapping[int, Row]) -> dict[str, float]:
    """Mean ms of each stage up to what slowness is judged by; a stage that a request didn't have counts as 0."""
    rows = [whole[line.id] for line in lines if line.id in whole]
    sums: dict[str, float] = {}
    for row in rows:
        stages = dict(row.timeline.stages)
        if row.timeline.unaccounted is not None:
            stages["unaccounted"] = row.timeline.unaccounted
        for stage, seconds in stages.items():
            sums[stage] = sums.get(stage, 0.0) + seconds * 1e3
    return {stage: total / len(rows) for stage, total in sums.items()}


def _difference(slow: Mapping[str, float], middle: Mapping[str, float]) -> list[dict[str, Any]]:
    more = {stage: ms - middle.get(stage, 0.0) for stage, ms in slow.items()}
    ordered = sorted(((stage, ms) for stage, ms in more.items() if ms > ROUNDING_MS), key=lambda one: -one[1])
    total = sum(ms for _, ms in ordered)
    return [{"stage": stage, "ms": round(ms, 6), "share": round(ms / total, 4)} for stage, ms in ordered]


def _distribution(values: Iterable[float | None]) -> dict[str, float] | None:
    ordered = sorted(value for value in values if value is not None)
    if not ordered:
        return None
    found = {f"p{share}": round(quantile(ordered, share / 100), 6) for share in (50, 95, 99)}
    return found | {"requests": len(ordered), "mean_for_reference": round(sum(ordered) / len(ordered), 6)}


def _sizes(lines: Sequence[Line], whole: Mapping[int, Row], by: str) -> dict[str, Any]:
    """Requests and TTFT by prompt-size class, of the rows that were read whole."""
    times: dict[str, list[float | None]] = {}
    for line in lines:
        times.setdefault(class_of(whole[line.id].ledger).size, []).append(getattr(line, by))
    return {
        size: {"share": round(len(times[size]) / len(lines), 4), by: _distribution(times[size])}
        for size in _SIZES
        if size in times
    }


def _group_view(lines: Sequence[Line], whole: Mapping[int, Row], by: str) -> dict[str, Any]:
    times = [getattr(line, by) for line in lines]
    return {
        "requests": len(lines),
        "from_ms": min(times, default=None),
        "to_ms": max(times, default=None),
        "stages_mean_ms": {stage: round(ms, 6) + 0.0 for stage, ms in _means(lines, whole).items()},
        "request_ids": [whole[line.id].ledger.request_id for line in lines[:5] if line.id in whole],
    }


def _health(view: Mapping[str, Any]) -> list[dict[str, Any]]:
    """P99 by P50, where there are enough requests for a P99 to mean anything."""
    found = []
    for name, fine, limit in (
        ("ttft_ms", HEALTHY_TTFT, UNHEALTHY_TTFT),
        ("tpot_ms", UNHEALTHY_TPOT, UNHEALTHY_TPOT),
    ):
        times = view[name]
        if times is None or times["requests"] < ENOUGH or not times["p50"]:
            continue
        ratio = times["p99"] / times["p50"]
        state = "ok" if ratio <= fine else "watch" if ratio <= limit else "bad"
        found.append({"rule": f"{name[:-3]}_p99_by_p50", "value": round(ratio, 3), "limit": limit, "state": state})
    return found


def _causes(judged: Sequence[Judged]) -> list[dict[str, Any]]:
    counted = Counter(one.finding.remedy.cause.value for one in judged).most_common()
    return [{"cause": cause, "requests": count, "share": round(count / len(judged), 4)} for cause, count in counted]


def _verdict(
    view: Mapping[str, Any], judged: Sequence[Judged], judge: Judge, language: Language, window: str
) -> dict[str, Any]:
    """The commonest cause among the slowest, with the action of the slowest request that has it."""
    leading = next((one["cause"] for one in view["causes"] if one["cause"] != "none"), None)
    example = next((one for one in judged if one.finding.remedy.cause.value == leading), None)
    if example is None:
        example = judged[0] if judged else None
    cause = example.finding.remedy.cause.value if example else "unknown"
    share = next((one["share"] for one in view["causes"] if one["cause"] == cause), 0.0)
    return {
        "cause": cause,
        "action": _action(example, judge, language) if example else None,
        "action_id": example.finding.remedy.action if example else None,
        "confidence": _confidence(share, judged, cause),
        "text": window_story(view, language, window),
    }


def _action(example: Judged, judge: Judge, language: Language) -> str:
    """What to do; where no cause is known, not the window's own command again."""
    if example.finding.remedy.action == "gather_evidence":
        return write(language, "window.look_at_each", {})
    return judge.advice(example, language)


def _confidence(share: float, judged: Sequence[Judged], cause: str) -> str:
    """Low below a third of the slowest, or when most of those verdicts are; high from 60 % of at least ten."""
    of_cause = [one.confidence.value for one in judged if one.finding.remedy.cause.value == cause]
    if share < 1 / 3 or of_cause.count("low") * 2 > len(of_cause):
        return "low"
    return "high" if share >= 0.6 and len(judged) >= 10 else "medium"
