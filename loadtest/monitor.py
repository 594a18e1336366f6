"""Watches the client itself and the engine while a load test runs: one sample every so often."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable
from typing import Any

from loadtest.driver import Progress
from loadtest.page import MetricsPage
from tracing.clock import Clock

LAG_PROBE_S = 0.02
BUSY_SHARE = 0.9
"""Of one core, from which on the client itself is suspected."""
LAG_LIMIT_MS = 10.0
"""Of the event loop at the median, from which on the client itself is suspected."""
LATE_LIMIT_MS = 20.0
"""The same at P99: the client's machine was busy, and its P99s may be its own."""


ReadGpus = Callable[[], dict[str, float]]
"""Figures of this machine's GPUs, by the names that loadtest/page.py has for them. May block for a moment."""


class Monitor:
    """Samples `at_ms` since the start: in flight, token events, the client's CPU, what the engine's page says."""

    def __init__(
        self,
        progress: Progress,
        clock: Clock,
        interval_ms: int,
        page: MetricsPage | None,
        read_gpus: ReadGpus | None = None,
    ) -> None:
        self._progress = progress
        self._clock = clock
        self._interval_s = interval_ms / 1000
        self._page = page
        self._read_gpus = read_gpus
        self.samples: list[dict[str, Any]] = []
        self._lag_at = array("q")
        self._lag_ns = array("q")

    async def run(self) -> None:
        """Samples until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._probe_lag())
            group.create_task(self._sample())

    def lag_ms(self, from_ns: int, to_ns: int) -> list[float]:
        """How late the event loop ran in an interval: the delay that the client itself may add to what it reads."""
        return [lag / 1e6 for at, lag in zip(self._lag_at, self._lag_ns, strict=True) if from_ns <= at < to_ns]

    def cpu_share(self, from_ns: int, to_ns: int) -> float | None:
        """The client's mean use of one core in an interval."""
        shares = [s["client_cpu"] for s in self.samples if from_ns <= s["at_ns"] < to_ns]
        return sum(shares) / len(shares) if shares else None

    async def _probe_lag(self) -> None:
        while True:
            due_ns = self._clock.mono_ns() + round(LAG_PROBE_S * 1e9)
            await asyncio.sleep(LAG_PROBE_S)
            now_ns = self._clock.mono_ns()
            self._lag_at.append(now_ns)
            self._lag_ns.append(max(0, now_ns - due_ns))

    async def _sample(self) -> None:
        before_ns, cpu_before = self._clock.mono_ns(), time.process_time()
        due_ns = before_ns
        while True:
            due_ns = max(due_ns + round(self._interval_s * 1e9), self._clock.mono_ns())
            await asyncio.sleep((due_ns - self._clock.mono_ns()) / 1e9)
            figures = await self._page.read() if self._page else {}
            if self._read_gpus:
                # Of this moment, where the page's may be a second old.
                figures |= await asyncio.to_thread(self._read_gpus)
            now_ns, cpu_now = self._clock.mono_ns(), time.process_time()
            self.samples.append(
                {
                    "at_ns": now_ns,
                    "in_flight": self._progress.in_flight,
                    "waiting_to_send": self._progress.waiting,
                    "token_events": self._progress.token_events,
                    "client_cpu": (cpu_now - cpu_before) * 1e9 / max(1, now_ns - before_ns),
                    **figures,
                }
            )
            before_ns, cpu_before = now_ns, cpu_now
