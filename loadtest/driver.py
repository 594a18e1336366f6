"""Drives the stages of a load test: keeps so many in flight, or sends on a schedule; nothing drains in between."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field

from loadtest.arrivals import arrivals
from loadtest.client import LoadClient
from loadtest.record import Fault, Record
from loadtest.settings import LoadTest
from loadtest.stages import Stage, Window, windows_of
from loadtest.workload import Maker
from tracing.clock import Clock

LEAD_NS = 20_000_000
"""From the decision to begin to the first request."""
MOST_WAITING = 50_000
"""Requests of an open loop that are due but have no room; those beyond are counted as unsent."""
HOPELESS_FAILURES = 20
HOPELESS_NS = 3_000_000_000
FAILURE_PAUSE_S = (0.05, 2.0)
"""A worker that fails waits before it asks again, longer each time: a server that refuses is not flooded."""


@dataclass
class Progress:
    """What a load test has done so far."""

    started_ns: int = 0
    in_flight: int = 0
    waiting: int = 0
    good: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    token_events: int = 0
    stopped: str | None = None
    """Why it ended before its time, in words."""


class Driver:
    """One run. `prompts` gives a new prompt for each request."""

    def __init__(
        self,
        client: LoadClient,
        stages: tuple[Stage, ...],
        prompts: Maker,
        load: LoadTest,
        clock: Clock,
        progress: Progress,
        drain_seconds: float,
    ) -> None:
        self._client = client
        self._stages = stages
        self._prompts = prompts
        self._load = load
        self._clock = clock
        self._rng = random.Random(load.seed)  # noqa: S311
        self._drain_seconds = drain_seconds
        self._stop = asyncio.Event()
        self._in_flight_wanted = 0
        self._workers = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.progress = progress
        self.records: list[Record] = []
        self.windows: tuple[Window, ...] = ()

    def stop(self, reason: str) -> None:
        """Ends the run now; what runs is cut off and kept as unfinished."""
        self.progress.stopped = self.progress.stopped or reason
        self._stop.set()

    async def run(self) -> None:
        """All stages, then the requests that still run; always leaves complete records behind."""
        self.progress.started_ns = self._clock.mono_ns() + LEAD_NS
        self.windows = windows_of(self._stages, self.progress.started_ns)
        try:
            await self._until(self.progress.started_ns)
            for stage, window in zip(self._stages, self.windows, strict=True):
                if self._stop.is_set():
                    break
                await self._run_stage(stage, window)
            self._in_flight_wanted = 0
            await self._drain()
        finally:
            left = list(self._tasks)
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
            for record in self.records:
                if not record.end_ns:
                    record.end_ns = self._clock.mono_ns()
                    self._count(record, Fault("unfinished", "before it could be sent"))

    async def _run_stage(self, stage: Stage, window: Window) -> None:
        if stage.rate:
            self._in_flight_wanted = 0
            await self._open_loop(stage, window)
            return
        self._in_flight_wanted = stage.concurrency
        for _ in range(stage.concurrency - self._workers):
            self._workers += 1
            self._spawn(self._work())
        await self._until(window.end_ns)

    async def _open_loop(self, stage: Stage, window: Window) -> None:
        room = asyncio.Semaphore(stage.concurrency)
        load = self._load
        schedule = arrivals(window.start_ns, window.end_ns, stage.rate, load.arrival, load.burstiness, self._rng)
        for due_ns in schedule:
            if await self._until(due_ns):
                return
            record = self._record(due_ns)
            if self.progress.waiting >= MOST_WAITING:
                record.end_ns = self._clock.mono_ns()
                self._count(record, Fault("unsent", f"{MOST_WAITING} were waiting already"))
            else:
                self._spawn(self._send_when_room(record, room))
        await self._until(window.end_ns)

    async def _send_when_room(self, record: Record, room: asyncio.Semaphore) -> None:
        self.progress.waiting += 1
        try:
            await room.acquire()
        except asyncio.CancelledError:
            record.end_ns = self._clock.mono_ns()
            self._count(record, Fault("unfinished", "before it could be sent"))
            raise
        finally:
            self.progress.waiting -= 1
        try:
            await self._ask(record)
        finally:
            room.release()

    async def _work(self) -> None:
        """One place of a closed loop: the next request as soon as the last has ended."""
        pause_s = FAILURE_PAUSE_S[0]
        try:
            while self._workers <= self._in_flight_wanted:
                record = self._record(self._clock.mono_ns())
                await self._ask(record)
                if record.is_good:
                    pause_s = FAILURE_PAUSE_S[0]
                else:
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, FAILURE_PAUSE_S[1])
        finally:
            self._workers -= 1

    async def _ask(self, record: Record) -> None:
        self.progress.in_flight += 1
        try:
            await self._client.ask(self._prompts(), record)
        finally:
            self.progress.in_flight -= 1
            self._count(record, record.fault)

    def _record(self, scheduled_ns: int) -> Record:
        record = Record(scheduled_ns)
        self.records.append(record)
        return record

    def _count(self, record: Record, fault: Fault | None) -> None:
        record.fault = fault
        if fault is None:
            self.progress.good += 1
            return
        self.progress.failed[fault.kind] += 1
        failures = self.progress.failed.total()
        long_enough = record.end_ns - self.progress.started_ns > HOPELESS_NS
        if not self.progress.good and failures >= HOPELESS_FAILURES and long_enough and not self._stop.is_set():
            self.stop(f"none of the first {failures} requests succeeded; the last: {fault.kind}: {fault.detail}")

    async def _drain(self) -> None:
        stopping = asyncio.create_task(self._stop.wait())
        deadline_ns = self._clock.mono_ns() + round(self._drain_seconds * 1e9)
        try:
            while self._tasks and not self._stop.is_set() and (left := deadline_ns - self._clock.mono_ns()) > 0:
                await asyncio.wait({*self._tasks, stopping}, timeout=left / 1e9, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()

    async def _until(self, instant_ns: int) -> bool:
        """Waits for an instant; True where the run is to stop."""
        left_s = (instant_ns - self._clock.mono_ns()) / 1e9
        if left_s > 0 and not self._stop.is_set():
            try:
                async with asyncio.timeout(left_s):
                    await self._stop.wait()
            except TimeoutError:
                return self._stop.is_set()
        return self._stop.is_set()

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.stop(f"a fault of tokenline's own: {type(error).__name__}: {error}")
