"""A load test from beginning to end: what it came to, as the object that is archived."""

from __future__ import annotations

import asyncio
import random
from bisect import bisect_right
from collections.abc import Callable
from typing import Any

from loadtest.archive import columns
from loadtest.client import LoadClient
from loadtest.driver import Driver, Progress
from loadtest.limits import raise_open_files
from loadtest.monitor import LATE_LIMIT_MS, Monitor
from loadtest.record import Record
from loadtest.session import (
    Asked,
    Session,
    complete_records,
    explained,
    heading,
    length_notes,
    open_bench,
    token_counts,
)
from loadtest.stages import Stage, Window
from loadtest.tally import tally, within
from tracing.clock import Clock

TELL_SECONDS = 0.25
TIMELINE_SECONDS = 1.0
FEW_REQUESTS = 100

Tell = Callable[[Driver, Progress], None]
"""Shown while it runs."""
IsStopped = Callable[[], bool]


async def run_load(
    asked: Asked, stages: tuple[Stage, ...], clock: Clock, *, is_stopped: IsStopped, tell: Tell
) -> dict[str, Any]:
    """Runs the stages. It ends by itself, and whatever the endpoint does, what was measured is returned."""
    settings = asked.settings
    # Prompts of an earlier run may still be in the server's prefix cache: never the same ones again.
    rng = random.SystemRandom()
    limit = raise_open_files(max(stage.concurrency for stage in stages))
    async with open_bench(asked, rng) as session:
        if limit:
            session.notes.append(limit)
        run = heading(session, "run", clock)
        progress = Progress()

        def on_tokens(events: int) -> None:
            progress.token_events += events

        client = LoadClient(session.endpoint, session.model, settings, clock, rng, on_tokens, run["run"])
        driver = Driver(
            client, stages, session.prompts, settings.load_test, clock, progress, settings.api.timeout_seconds
        )
        monitor = Monitor(progress, clock, settings.metrics.sample_interval_ms, session.page, asked.read_gpus)
        beside = [asyncio.create_task(monitor.run()), asyncio.create_task(_watch(driver, progress, is_stopped, tell))]
        try:
            await driver.run()
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
        session.notes += await complete_records(session, driver.records)
        return {**run, **_outcome(session, stages, driver, monitor)}


async def _watch(driver: Driver, progress: Progress, is_stopped: IsStopped, tell: Tell) -> None:
    while True:
        if is_stopped():
            driver.stop("it was stopped by hand")
        tell(driver, progress)
        await asyncio.sleep(TELL_SECONDS)


def _outcome(session: Session, stages: tuple[Stage, ...], driver: Driver, monitor: Monitor) -> dict[str, Any]:
    settings = session.asked.settings
    records, progress = driver.records, driver.progress
    ended_ns = max([record.end_ns for record in records], default=progress.started_ns)
    windows = [_cut(window, ended_ns, progress) for window in driver.windows]
    reached = [
        {
            **within(window, progress.started_ns),
            **tally(
                stage,
                window,
                records,
                monitor,
                session.asked.slo_ms,
                is_stream=settings.workload.stream,
                collect=settings.metrics,
            ),
        }
        for stage, window in zip(stages, windows, strict=True)
        if window is not None
    ]
    starts = [window.start_ns for window in driver.windows]

    def stage_of(record: Record) -> int:
        return max(0, bisect_right(starts, record.scheduled_ns) - 1)

    end_ns = max([ended_ns, *(window.end_ns for window in windows if window is not None)])
    return {
        "stopped": progress.stopped,
        "token_counts": token_counts(records),
        "stages": reached,
        "explained": explained(records),
        "notes": [*session.notes, *length_notes(session, records), *_notes(reached)],
        "timeline": timeline(records, progress.started_ns, end_ns),
        "samples": _samples(monitor, progress.started_ns),
        "requests": columns(records, progress.started_ns, stage_of),
    }


def _cut(window: Window, ended_ns: int, progress: Progress) -> Window | None:
    """The part of a stage that took place; None where nothing of what counts did."""
    if progress.stopped is None or ended_ns >= window.end_ns:
        return window
    if ended_ns <= window.start_ns:
        return None
    # Stopped before its counted part: what there was of it is shown, rather than nothing.
    counted_ns = window.counted_ns if ended_ns > window.counted_ns else window.start_ns
    return Window(window.start_ns, counted_ns, ended_ns)


def _notes(stages: list[dict[str, Any]]) -> list[str]:
    notes = []
    for number, stage in enumerate(stages, 1):
        client = stage["client"]
        if client["was_bottleneck"]:
            notes.append(
                f"stage {number}: the client itself was busy (CPU {client['cpu_share'] or 0:.0%} of a core, event loop "
                f"{client['loop_lag_ms']['p50'] or 0:.1f} ms late): its figures say more of itself than of the server"
            )
        elif (client["loop_lag_ms"]["p99"] or 0) >= LATE_LIMIT_MS:
            notes.append(
                f"stage {number}: the client's machine was busy: its event loop was "
                f"{client['loop_lag_ms']['p99']:.0f} ms late at P99, and so may be what it read"
            )
        if stage["requests"] and stage["e2e_ms"]["count"] < FEW_REQUESTS:
            notes.append(
                f"stage {number}: {stage['e2e_ms']['count']} requests: P99 is little else than the slowest of them"
            )
    return notes


def timeline(records: list[Record], start_ns: int, end_ns: int) -> dict[str, Any]:
    """Tokens per second, second by second."""
    count = max(1, round((end_ns - start_ns) / 1e9 / TIMELINE_SECONDS))
    bins = [0.0] * count
    for record in records:
        events = record.token_events
        weight = record.output_tokens / len(events) if events and record.is_good else 1.0
        for at in events:
            place = int((at - start_ns) / 1e9 / TIMELINE_SECONDS)
            if 0 <= place < count:
                bins[place] += weight
    return {"seconds": TIMELINE_SECONDS, "tps": [round(tokens / TIMELINE_SECONDS, 2) for tokens in bins]}


def _samples(monitor: Monitor, start_ns: int) -> list[dict[str, Any]]:
    return [
        {"at_ms": round((sample["at_ns"] - start_ns) / 1e6), **{k: v for k, v in sample.items() if k != "at_ns"}}
        for sample in monitor.samples
    ]
