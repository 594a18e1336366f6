"""Time: the monotonic clock that durations come from, the wall clock that places them, and whose clock it is.

On Linux `time.perf_counter_ns` reads CLOCK_MONOTONIC, which the processes of one boot of one host (and one time
namespace) share. Timestamps of two hosts are never subtracted.
"""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path
from typing import Protocol

from protocol.timings import HostIdentity


class Clock(Protocol):
    """A source of time that tests may own."""

    def mono_ns(self) -> int:
        """Nanoseconds of CLOCK_MONOTONIC."""

    def wall_ns(self) -> int:
        """Nanoseconds since 1970 UTC; read once per request, only to place it on the calendar."""


class SystemClock:
    """The machine's own clocks."""

    mono_ns = staticmethod(time.perf_counter_ns)
    wall_ns = staticmethod(time.time_ns)


class FakeClock:
    """A clock that moves only when told to."""

    def __init__(self, mono: int = 1_000_000_000, wall: int = 1_800_000_000_000_000_000) -> None:
        self._mono = mono
        self._wall = wall

    def mono_ns(self) -> int:
        return self._mono

    def wall_ns(self) -> int:
        return self._wall

    def advance_ms(self, ms: float) -> int:
        """Moves both clocks and returns the new monotonic time in ns."""
        step = round(ms * 1e6)
        self._mono += step
        self._wall += step
        return self._mono


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


@cache
def host_identity() -> HostIdentity:
    """Identity of this process's monotonic clock. Without a boot id nothing else can equal it."""
    host_id = _read("/etc/machine-id") or _read("/proc/sys/kernel/hostname") or "unknown"
    boot_id = _read("/proc/sys/kernel/random/boot_id") or f"unknown-{time.time_ns()}"
    return HostIdentity(host_id, boot_id, " ".join(_read("/proc/self/timens_offsets").split()))
