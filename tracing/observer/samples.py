"""Requests in few words, many at a time: what a load test joins to its own times, and compares live traffic with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from fastapi.concurrency import run_in_threadpool

from tracing.observer.baseline import class_of, computed_tokens, tpot_of
from tracing.observer.core import Observer
from tracing.observer.rows import Row, milliseconds
from tracing.observer.window_rows import WindowRows
from tracing.observer.windows import window_ns

MAX_IDS = 1_000
MAX_SAMPLES = 2_000
FLUSH_SECONDS = 2.0


async def samples_of(observer: Observer, ids: Sequence[str]) -> dict[str, Any]:
    """By our own request id, those of `ids` that are known."""
    rows = await run_in_threadpool(observer.store.named, ids)
    return {row.ledger.request_id: sample_of(row) for row in rows}


async def live_samples(observer: Observer, window: str, model: str | None) -> dict[str, Any]:
    """What users sent in the window, without load tests. Raises ValueError for a window that isn't one."""
    since_ns = observer.clock.wall_ns() - window_ns(window)
    rows = WindowRows(observer.settings.traces_path, since_ns=since_ns, model=model, with_load_tests=False)

    def work() -> dict[str, Any]:
        observer.store.flush(FLUSH_SECONDS)
        rows.read()
        return live_view(rows)

    return {"window": window, "model": model, **await run_in_threadpool(work)}


def live_view(rows: WindowRows) -> dict[str, Any]:
    """Counts of everything in the window, and samples of what ended well, evenly spread and at most MAX_SAMPLES."""
    good = [line for line in rows.lines if line.outcome == "ok"]
    step = -(-len(good) // MAX_SAMPLES) or 1
    chosen = good[::step]
    whole = rows.whole(chosen)
    return {
        "requests": rows.total,
        "load_tests_left_out": rows.left_out,
        "outcomes": dict(Counter(line.outcome for line in rows.lines).most_common()),
        "samples": [sample_of(whole[line.id]) for line in chosen if line.id in whole],
    }


def sample_of(row: Row) -> dict[str, Any]:
    """One request. Times in ms, every stage to its end with `unaccounted`; what nobody measured is absent or null."""
    ledger, timeline = row.ledger, row.timeline
    timings, usage = ledger.timings, ledger.usage
    engine = timings.engine if timings is not None else None
    stages = timeline.stages | timeline.after
    if timeline.unaccounted is not None:
        stages = stages | {"unaccounted": timeline.unaccounted}
    return {
        "upstream": ledger.upstream,
        "upstream_model": ledger.attempts[-1].model if ledger.attempts else None,
        "size": class_of(ledger).size,
        "stream": ledger.stream,
        "outcome": ledger.outcome.value,
        "ttft_ms": milliseconds(timeline.ttft),
        "tpot_ms": milliseconds(tpot_of(row)),
        "e2e_ms": milliseconds(timeline.e2e),
        "stages_ms": {name: milliseconds(seconds) for name, seconds in stages.items()},
        "placement": timeline.placement,
        "prompt_tokens": usage.input_tokens,
        "computed_tokens": computed_tokens(ledger),
        "output_tokens": usage.output_tokens,
        "mean_batch": timings.mean_batch if timings is not None else None,
        "engine_running": engine.running if engine is not None else None,
        "engine_waiting": engine.waiting if engine is not None else None,
        "client_rtt_ms": round(ledger.client_rtt_ns / 1e6, 6) if ledger.client_rtt_ns else None,
    }
