"""Who hands steps to the device: the caller itself, or a thread of its own that a step is put in the queue of."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from backend_engine.core.step import Device, Flight, StepPlan, StepResult, StepVoid


class Forward(Protocol):
    """Starts steps in order. `start` never raises what a step raises: its flight does, when it is waited for."""

    device: Device

    def start(self, plan: StepPlan) -> Flight:
        """Hands a step over."""

    def resume(self) -> None:
        """The caller knows of every step that failed, and of those that are void with it."""

    def close(self) -> None:
        """No step comes any more."""


class FailedFlight:
    """A step that could not be launched."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def wait(self) -> StepResult:
        """Raises why."""
        raise self._error


class Launcher:
    """Launches steps; the failure of one is its flight's.

    A step that failed may have written no row of those it was to write. What was planned before that was known counts
    on them: launched all the same, it would put keys and values into pages that rows held before, which may be
    another's now. So nothing is launched until the planner knows.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._has_failed = False

    def launch(self, plan: StepPlan) -> Flight:
        """Never raises."""
        if self._has_failed:
            return FailedFlight(StepVoid("the step before it failed"))
        try:
            return self._device.launch(plan)
        except Exception as error:
            self._has_failed = True
            return FailedFlight(error)

    def resume(self) -> None:
        """What comes now was planned with the failure in mind. No step may be on its way here."""
        self._has_failed = False


class InlineForward:
    """The caller's own thread launches."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._launcher = Launcher(device)

    def start(self, plan: StepPlan) -> Flight:
        """Launches the step."""
        return self._launcher.launch(plan)

    def resume(self) -> None:
        """See Launcher."""
        self._launcher.resume()

    def close(self) -> None:
        """Nothing to end."""


class QueuedFlight:
    """A step in the forward thread's queue, and then its flight."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self._launched = threading.Event()
        self._flight: Flight | None = None

    def left(self, flight: Flight) -> None:
        """The forward thread has launched it."""
        self._flight = flight
        self._launched.set()

    def wait(self) -> StepResult:
        """Blocks until the step was launched and has ended."""
        self._launched.wait()
        assert self._flight is not None
        return self._flight.wait()


class ForwardThread:
    """A thread that opens the device and then only launches. Its queue holds one step: `start` blocks while the step
    before is still in it.

    Two semaphores count the queue's room and its content. Launching needs nothing from the host but the plan, so the
    thread goes on to the next step while the scheduler waits for the end of the one before.

    Who launches must be who opened: OpenMP keeps a team of threads for each thread that ever computed in parallel. A
    second team, though it has nothing more to do, makes libgomp count more threads than cores, and then every barrier
    of a step sleeps in the kernel and does not spin: 18 ms of a decode step of 58 ms (SmolLM2-135M, two cores).
    """

    def __init__(self, opens: Callable[[], Device]) -> None:
        """`opens` is called by the thread; what it raises is raised here."""
        self._room = threading.Semaphore(1)
        self._content = threading.Semaphore(0)
        self._next: QueuedFlight | None = None
        opened: Future[Device] = Future()
        self._thread = threading.Thread(target=self._run, args=(opens, opened), name="forward", daemon=True)
        self._thread.start()
        try:
            self.device = opened.result()
        except BaseException:  # also Ctrl-C while it opens
            self._content.release()  # a thread that opens it all the same finds no step, and ends
            self._thread.join()
            raise
        self._launcher = Launcher(self.device)

    def start(self, plan: StepPlan) -> Flight:
        """Puts a step in the queue."""
        flight = QueuedFlight(plan)
        self._room.acquire()
        self._next = flight
        self._content.release()
        return flight

    def resume(self) -> None:
        """See Launcher. The thread is idle: every step that it was given has been waited for."""
        self._launcher.resume()

    def close(self) -> None:
        """Ends the thread when what it has is launched."""
        self._room.acquire()
        self._next = None
        self._content.release()
        self._thread.join()

    def _run(self, opens: Callable[[], Device], opened: Future[Device]) -> None:
        try:
            opened.set_result(opens())
        except BaseException as error:
            opened.set_exception(error)
            return
        while True:
            self._content.acquire()
            flight = self._next
            self._room.release()
            if flight is None:
                return
            flight.left(self._launcher.launch(flight.plan))


def start_forward(opens: Callable[[], Device], *, has_thread: bool) -> Forward:
    """The device is opened by the thread that will launch its steps; raises what `opens` raises."""
    return ForwardThread(opens) if has_thread else InlineForward(opens())
