"""A sampling: requests one after another, short and long ones apart and mixed, each of them shown."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from loadtest.archive import columns
from loadtest.client import LoadClient
from loadtest.driver import Progress
from loadtest.health import health
from loadtest.monitor import Monitor
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
from loadtest.workload import FilePrompts, Maker
from tracing.clock import Clock

MIXED = "mixed"
POLL_SECONDS = 0.1

Shown = Callable[[str, int, Record], None]
"""Told of each request that has ended: its group, its number in it."""


async def run_sample(
    asked: Asked, count: int, clock: Clock, *, is_stopped: Callable[[], bool], show: Shown
) -> dict[str, Any]:
    """`count` requests of each group, after one that only warms up. What was measured is returned in any case."""
    settings = asked.settings
    rng = random.SystemRandom()
    async with open_bench(asked, rng) as session:
        run = heading(session, "sample", clock)
        progress = Progress(started_ns=clock.mono_ns())
        client = LoadClient(session.endpoint, session.model, settings, clock, rng, run_id=run["run"])
        monitor = Monitor(progress, clock, settings.metrics.sample_interval_ms, session.page, asked.read_gpus)
        watching = asyncio.create_task(monitor.run())
        sampler = _Sampler(client, clock, is_stopped, show)
        try:
            await sampler.one("", 0, _groups(session)[0][1], is_shown=False)
            for group, make in _groups(session):
                await sampler.group(group, make, count)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        session.notes += await complete_records(session, [record for *_, found in sampler.groups for record in found])
        return {**run, **_outcome(session, sampler, monitor, progress.started_ns)}


class _Sampler:
    def __init__(self, client: LoadClient, clock: Clock, is_stopped: Callable[[], bool], show: Shown) -> None:
        self._client = client
        self._clock = clock
        self._is_stopped = is_stopped
        self._show = show
        self.groups: list[tuple[str, Window, list[Record]]] = []
        self.was_stopped = False

    async def group(self, name: str, make: Maker, count: int) -> None:
        """One group's requests, one after another."""
        if self.was_stopped:
            return
        start_ns = self._clock.mono_ns()
        records: list[Record] = []
        for number in range(1, count + 1):
            record = await self.one(name, number, make)
            records.append(record)
            if self.was_stopped:
                break
        end_ns = self._clock.mono_ns()
        self.groups.append((name, Window(start_ns, start_ns, end_ns + 1), records))

    async def one(self, name: str, number: int, make: Maker, *, is_shown: bool = True) -> Record:
        """A request to its end, or until the sampling is stopped."""
        record = Record(self._clock.mono_ns())
        asking = asyncio.create_task(self._client.ask(make(), record))
        while not asking.done() and not self.was_stopped:
            await asyncio.wait((asking,), timeout=POLL_SECONDS)
            self.was_stopped = self._is_stopped()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        if is_shown:
            self._show(name, number, record)
        return record


def _groups(session: Session) -> list[tuple[str, Maker]]:
    prompts = session.prompts
    if isinstance(prompts, FilePrompts):
        return [("file", prompts)]
    groups: list[tuple[str, Maker]] = [(size.name or "all", partial(prompts.of, size)) for size in prompts.sizes]
    return [*groups, (MIXED, prompts)] if len(groups) > 1 else groups


def _outcome(session: Session, sampler: _Sampler, monitor: Monitor, start_ns: int) -> dict[str, Any]:
    settings = session.asked.settings
    stages = []
    everything: list[Record] = []
    places: list[int] = []
    for place, (group, window, records) in enumerate(sampler.groups):
        figures = tally(
            Stage(1, window.counted_seconds, window.counted_seconds),
            window,
            records,
            monitor,
            session.asked.slo_ms,
            is_stream=settings.workload.stream,
            collect=settings.metrics,
        )
        stages.append({"group": group, **within(window, start_ns), **figures})
        everything += records
        places += [place] * len(records)
    place_of = iter(places)
    return {
        "stopped": "it was stopped by hand" if sampler.was_stopped else None,
        "token_counts": token_counts(everything),
        "stages": stages,
        "health": [msgspec.to_builtins(rule) for stage in stages for rule in health(stage)],
        "explained": explained(everything),
        "notes": [*session.notes, *length_notes(session, everything)],
        "requests": columns(everything, start_ns, lambda _record: next(place_of)),
    }
