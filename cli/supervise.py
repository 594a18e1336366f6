"""The supervisor: starts the processes, starts again what died, ends all of it in order.

It does nothing by itself: whoever owns it calls `tick` several times a second.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from cli.backoff import Backoff
from settings.feed import Message


class Running(Protocol):
    """A child process as the supervisor sees it."""

    def exit_code(self) -> int | None: ...
    def failure(self) -> str | None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...
    def send(self, message: Message) -> None: ...
    def messages(self) -> list[Message]: ...


@dataclass(frozen=True)
class Part:
    """One process of the whole. Parts are ended in the order in which they are listed."""

    name: str
    start: Callable[[], Running]
    grace_seconds: float
    """How long it may take to end in order."""


@dataclass
class _Place:
    part: Part
    running: Running | None = None
    started: float = 0.0
    due: float | None = None
    """When it is started again; None: not waiting."""
    was_ready: bool = False
    backoff: Backoff = field(default_factory=Backoff)


@dataclass(frozen=True)
class StartFailure:
    """A part that ended before it was ever ready: starting it again would only repeat that."""

    name: str
    reason: str


class Supervisor:
    """Keeps parts running. `clock` in seconds."""

    def __init__(
        self,
        parts: Sequence[Part],
        *,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._places = [_Place(part) for part in parts]
        self._say = say
        self._clock = clock
        self._sleep = sleep
        self.start_failure: StartFailure | None = None

    def start(self) -> None:
        """Starts every part."""
        for place in self._places:
            self._launch(place)

    def running(self) -> dict[str, Running]:
        """Parts that run now, by name."""
        return {place.part.name: place.running for place in self._places if place.running is not None}

    def mark_ready(self, name: str) -> None:
        """From now on the part is started again whenever it ends."""
        for place in self._places:
            if place.part.name == name:
                place.was_ready = True

    def tick(self) -> None:
        """Takes note of what ended; starts what is due."""
        for place in self._places:
            if place.running is not None and (code := place.running.exit_code()) is not None:
                self._ended(place, place.running, code)
            elif place.due is not None and self._clock() >= place.due:
                self._launch(place)

    def stop(self, hurried: Callable[[], bool] = lambda: False) -> None:
        """Ends every part, one after the other; at once when `hurried` says so."""
        for place in self._places:
            place.due = None
            running, place.running = place.running, None
            if running is None or running.exit_code() is not None:
                continue
            running.terminate()
            deadline = self._clock() + place.part.grace_seconds
            while running.exit_code() is None and self._clock() < deadline and not hurried():
                self._sleep(0.02)
            if running.exit_code() is None:
                if not hurried():
                    self._say(f"{place.part.name} did not end within {place.part.grace_seconds:g} s; killed")
                running.kill()
                while running.exit_code() is None:
                    self._sleep(0.02)

    def _launch(self, place: _Place) -> None:
        place.due = None
        place.started = self._clock()
        place.running = place.part.start()

    def _ended(self, place: _Place, running: Running, code: int) -> None:
        place.running = None
        reason = running.failure() or _reason_of(code)
        if not place.was_ready:
            self.start_failure = self.start_failure or StartFailure(place.part.name, reason)
            return
        delay = place.backoff.delay_after(self._clock() - place.started)
        place.due = self._clock() + delay
        self._say(f"{place.part.name} ended ({reason}); it is started again in {delay:g} s")


def _reason_of(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
    hint = "; the system may have run out of memory" if -code == signal.SIGKILL else ""
    return f"{name}{hint}"
