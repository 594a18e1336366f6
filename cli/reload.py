"""Reloading: reads the configuration again, and has every process that can take it into force.

Asked by SIGHUP, or by the observer for the admin API. A configuration that can't be used changes nothing. It does
nothing by itself: whoever owns it calls `tick` several times a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from cli.errors import CliError
from settings.errors import SettingsError
from settings.feed import Message
from settings.reloading import Change, change_of
from settings.schema import Settings
from settings.transfer import pack_settings

CONFIRM_SECONDS = 5.0
"""A process that has not confirmed by then is named; what it was told waits for it."""

OBSERVER = "observer"


class Process(Protocol):
    """A child as it is talked to."""

    def send(self, message: Message) -> None: ...
    def messages(self) -> list[Message]: ...


@dataclass
class _UnderWay:
    number: int
    change: Change
    waiting: set[str]
    """Names of processes that have not confirmed."""
    due: float
    asked: list[int]
    failed: str | None = None


class Reloader:
    """Keeps the settings in force. `load` reads and checks them anew; `processes` are those that take settings."""

    def __init__(
        self,
        settings: Settings,
        load: Callable[[], Settings],
        processes: Callable[[], Mapping[str, Process]],
        *,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.line = pack_settings(settings)
        """What a process that starts now is given."""
        self._load = load
        self._processes = processes
        self._say = say
        self._clock = clock
        self._number = 0
        self._is_asked = False
        self._asked: list[int] = []
        """Numbers of the observer's wishes that wait."""
        self._under_way: _UnderWay | None = None

    def ask(self) -> None:
        """Reload soon."""
        self._is_asked = True

    def tick(self) -> None:
        """Hears processes, ends the reload that is under way when all have confirmed it, begins one that is asked."""
        processes = self._processes()
        for name, process in processes.items():
            for message in process.messages():
                self._hear(name, message)
        if self._under_way is not None:
            self._under_way.waiting &= processes.keys()  # whoever is started again starts with the new settings
            if not self._under_way.waiting or self._clock() >= self._under_way.due:
                self._end(self._under_way)
        elif self._is_asked:
            self._begin(processes)

    def _hear(self, name: str, message: Message) -> None:
        if "reload" in message:
            self._is_asked = True
            self._asked.append(message["reload"])
        elif self._under_way is not None and message.get("applied") == self._under_way.number:
            self._under_way.waiting.discard(name)
            if "failed" in message:
                self._under_way.failed = f"{name}: {message['failed']}"

    def _begin(self, processes: Mapping[str, Process]) -> None:
        asked, self._asked, self._is_asked = self._asked, [], False
        try:
            change = change_of(self.settings, self._load())
        except Exception as error:  # whatever it is, no reload may take a running gateway down
            reason = str(error) if isinstance(error, SettingsError | CliError) else f"{type(error).__name__}: {error}"
            self._say(f"configuration not reloaded: {reason}; what was in force stays so")
            self._tell({"result": "failed", "error": reason, "asked": asked})
            return
        self._number += 1
        waiting: set[str] = set()
        if change.is_any:
            self.settings, self.line = change.settings, pack_settings(change.settings)
            for name, process in processes.items():
                process.send({"number": self._number, "settings": self.line.decode()})
                waiting.add(name)
        self._under_way = _UnderWay(self._number, change, waiting, self._clock() + CONFIRM_SECONDS, asked)

    def _end(self, ended: _UnderWay) -> None:
        self._under_way = None
        change, late = ended.change, sorted(ended.waiting)
        self._say(f"configuration reloaded: {in_words(change)}")
        if late:
            self._say(f"not confirmed within {CONFIRM_SECONDS:g} s by {', '.join(late)}, which take it when they can")
        if ended.failed:
            self._say(f"configuration not taken by {ended.failed}")
        self._tell(
            {
                "result": "failed" if ended.failed else "ok",
                "error": ended.failed,
                "added": change.added,
                "removed": change.removed,
                "changed": change.changed,
                "needs_restart": change.needs_restart,
                "late": late,
                "asked": ended.asked,
            }
        )

    def _tell(self, result: Message) -> None:
        observer = self._processes().get(OBSERVER)
        if observer is not None:
            observer.send({"reloaded": result})


def in_words(change: Change) -> str:
    """`added upstreams.b; changed models.m; needs a restart: server.port`."""
    parts = [
        f"{what} {', '.join(names)}"
        for what, names in (("added", change.added), ("removed", change.removed), ("changed", change.changed))
        if names
    ]
    if change.needs_restart:
        parts.append(f"needs a restart: {', '.join(change.needs_restart)}")
    return "; ".join(parts) or "nothing is different"
