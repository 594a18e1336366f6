"""Stages of a load test: so much load for so long, of which the last part counts."""

from __future__ import annotations

import re
from dataclasses import dataclass

from loadtest.settings import LoadTest
from settings.errors import SettingsError

COUNTED_SHARE = 2 / 3
"""Of a stage: its first third is for what still runs from the stage before to leave, and for queues to settle."""
_STAGE = re.compile(r"(\d+(?:\.\d+)?)(rps)?:(\d+(?:\.\d+)?)(ms|s|m|h)\Z")
_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600}


@dataclass(frozen=True)
class Stage:
    """One level of load. Closed loop: `concurrency` in flight. Open loop: `rate` per second, at most that many."""

    concurrency: int
    seconds: float
    counted_seconds: float
    rate: float = 0.0

    def __str__(self) -> str:
        load = f"{self.rate:g} requests/s" if self.rate else f"{self.concurrency} in flight"
        return f"{load} for {self.seconds:g} s"


@dataclass(frozen=True)
class Window:
    """A stage's place in time, monotonic ns: it counts from `counted_ns` to `end_ns`."""

    start_ns: int
    counted_ns: int
    end_ns: int

    @property
    def counted_seconds(self) -> float:
        return (self.end_ns - self.counted_ns) / 1e9

    def counts(self, instant_ns: int) -> bool:
        """Whether an instant is in the part that counts."""
        return self.counted_ns <= instant_ns < self.end_ns


def parse_stages(text: str, most_in_flight: int) -> tuple[Stage, ...]:
    """Stages of `32:30s,128:3m` (in flight) or `10rps:1m` (per second). Raises SettingsError."""
    stages = []
    for part in text.split(","):
        found = _STAGE.match(part.strip())
        if not found or not float(found[1]) or not float(found[3]):
            raise SettingsError(
                f"--stages: {part.strip()!r} is not a stage; write IN_FLIGHT:TIME or RATErps:TIME, "
                "such as 32:30s,128:3m or 10rps:1m"
            )
        if not found[2] and "." in found[1]:
            raise SettingsError(
                f"--stages: {part.strip()!r}: {found[1]} requests can't be in flight; write a whole number"
            )
        seconds = float(found[3]) * _SECONDS[found[4]]
        rate = float(found[1]) if found[2] else 0.0
        in_flight = most_in_flight if found[2] else int(found[1])
        stages.append(Stage(in_flight, seconds, seconds * COUNTED_SHARE, rate))
    return tuple(stages)


def stage_of(load: LoadTest) -> Stage:
    """The one stage of settings without a list of stages: the warm-up, then all of the duration counts."""
    seconds = load.warmup_seconds + load.duration_seconds
    return Stage(load.concurrency, seconds, load.duration_seconds, load.request_rate)


def windows_of(stages: tuple[Stage, ...], start_ns: int) -> tuple[Window, ...]:
    """The stages' places, one after another from `start_ns`."""
    windows = []
    for stage in stages:
        end_ns = start_ns + round(stage.seconds * 1e9)
        windows.append(Window(start_ns, end_ns - round(stage.counted_seconds * 1e9), end_ns))
        start_ns = end_ns
    return tuple(windows)
