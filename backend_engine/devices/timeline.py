"""When steps began and ended on a device, in ns of the host's clock."""

from __future__ import annotations

from typing import Protocol

import msgspec
import torch

from tracing.clock import Clock


class StepTimes(msgspec.Struct, frozen=True):
    """One step's times, monotonic ns."""

    start_ns: int
    end_ns: int
    slot_kernel_ns: int


class Marks(Protocol):
    """Stamps of one step, made in the order in which the device gets its work."""

    def forward_done(self) -> None:
        """The forward is handed over; sampling and slot kernels follow."""

    def done(self) -> None:
        """All of the step is handed over."""

    def times(self) -> StepTimes:
        """Known once the step has ended."""


class HostMarks:
    """A CPU step: it has run when the call that runs it returns."""

    def __init__(self, clock: Clock, start_ns: int) -> None:
        self._clock = clock
        self._start_ns = start_ns
        self._forward_ns = self.end_ns = start_ns

    def forward_done(self) -> None:
        self._forward_ns = self._clock.mono_ns()

    def done(self) -> None:
        self.end_ns = self._clock.mono_ns()

    def times(self) -> StepTimes:
        return StepTimes(self._start_ns, self.end_ns, self.end_ns - self._forward_ns)


class CudaMarks:
    """Events in the stream. A start event fires when the step before has ended, or at once on an idle device, which is
    the definition of a step's start. Unverified so far: no GPU was at hand."""

    def __init__(self, timeline: CudaTimeline) -> None:
        self._timeline = timeline
        self.start = _event()
        self.forward = _event()
        self.end = _event()
        self.start.record()

    def forward_done(self) -> None:
        self.forward.record()

    def done(self) -> None:
        self.end.record()

    def times(self) -> StepTimes:
        return self._timeline.place(self)


class CudaTimeline:
    """Places events on the host's clock: the host looks at its clock while the device is idle, and from there on the
    distances between events count. Each step starts from the end of the one before, so that float32 milliseconds keep
    their precision."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._known: torch.cuda.Event | None = None
        self._known_ns = 0

    def begin(self, *, is_idle: bool) -> CudaMarks:
        """Marks for a step that is launched now."""
        if is_idle or self._known is None:
            self._known = _event()
            self._known.record()
            self._known.synchronize()
            self._known_ns = self._clock.mono_ns()
        return CudaMarks(self)

    def place(self, marks: CudaMarks) -> StepTimes:
        """Times of a step that has ended; steps must be placed in their order."""
        assert self._known is not None
        marks.end.synchronize()
        start_ns = self._known_ns + round(self._known.elapsed_time(marks.start) * 1e6)
        end_ns = start_ns + round(marks.start.elapsed_time(marks.end) * 1e6)
        end_ns = min(end_ns, self._clock.mono_ns())  # the host has seen it end, so its clock is ahead of that
        kernel_ns = round(marks.forward.elapsed_time(marks.end) * 1e6)
        self._known, self._known_ns = marks.end, end_ns
        return StepTimes(start_ns, end_ns, kernel_ns)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
