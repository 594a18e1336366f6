"""Where the host's time between two steps goes, by part."""

from __future__ import annotations

import time

from backend_engine.core.loop import EngineCore, Launched
from backend_engine.core.step import Flight, StepPlan, StepResult

SCHEDULE, APPEND_AND_STOP, DETOKENISE, SEND, PREPARE = "schedule", "append_and_stop", "detokenise", "send", "prepare"
PARTS = (SCHEDULE, APPEND_AND_STOP, DETOKENISE, SEND, PREPARE)


class HostTimes:
    """Sums of host time by part, ns."""

    def __init__(self) -> None:
        self._spent_ns = dict.fromkeys(PARTS, 0)

    def add(self, part: str, ns: int) -> None:
        """Time spent on a part."""
        self._spent_ns[part] += ns

    def reset(self) -> None:
        """Forgets all."""
        self._spent_ns = dict.fromkeys(PARTS, 0)

    def per_step_ms(self, steps: int) -> dict[str, float]:
        """Mean of each part over `steps`."""
        return {part: ns / steps / 1e6 for part, ns in self._spent_ns.items()}


class TimedFlight:
    """A flight that knows how long it was waited for."""

    def __init__(self, inner: Flight, times: HostTimes) -> None:
        self._inner = inner
        self._times = times
        self.waited_ns = 0

    def wait(self) -> StepResult:
        """Waits, and notes what the device's side of the host spent on handing the step over."""
        began_ns = time.perf_counter_ns()
        result = self._inner.wait()
        self.waited_ns = time.perf_counter_ns() - began_ns
        self._times.add(PREPARE, result.prepare_ns)
        return result


class TimedCore(EngineCore):
    """The engine core itself, with a watch on the host's side of each step."""

    times: HostTimes

    def launch(self, plan: StepPlan) -> Launched:
        """As the core does."""
        launched = super().launch(plan)
        self.times.add(SCHEDULE, plan.schedule_ns)
        return Launched(plan, TimedFlight(launched.flight, self.times), launched.state, launched.is_after_idleness)

    def commit(self, launched: Launched) -> None:
        """As the core does; what is left without the wait is appending and stopping."""
        began_ns = time.perf_counter_ns()
        super().commit(launched)
        assert isinstance(launched.flight, TimedFlight)
        spent_ns = time.perf_counter_ns() - began_ns - launched.flight.waited_ns
        self.times.add(APPEND_AND_STOP, spent_ns)
