"""The settings of a process that runs: as it started, and what its supervisor makes of them later.

Messages are small JSON objects. From the supervisor: `{"number", "settings"}` (take these into force) and whatever else
a role listens for; to it: `{"applied": number}`, with `failed` and the reason where that did not work.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from settings.schema import Settings
from settings.transfer import unpack_settings

MAX_EARLY = 64
"""Messages kept for a process that does not listen yet."""

Message = dict[str, Any]


class Feed:
    """`put` takes messages on any thread; `listen` has them handed over on the event loop that it is called on."""

    def __init__(self, settings: Settings, answer: Callable[[Message], None] = lambda message: None) -> None:
        self.settings = settings
        """In force now."""
        self.answer = answer
        """Tells the supervisor something. A line in a pipe: it does not wait."""
        self._lock = threading.Lock()
        self._early: deque[Message] = deque(maxlen=MAX_EARLY)
        self._deliver: Callable[[Message], None] | None = None

    def put(self, message: Message) -> None:
        """A message of the supervisor."""
        with self._lock:
            if self._deliver is None:
                self._early.append(message)
            else:
                self._deliver(message)

    def listen(
        self, apply: Callable[[Settings], None], other: Callable[[Message], None] = lambda message: None
    ) -> None:
        """From now on new settings go to `apply`, other messages to `other`; those that came before come first."""
        loop = asyncio.get_running_loop()

        def deliver(message: Message) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and the process with it
                loop.call_soon_threadsafe(self._take, message, apply, other)

        with self._lock:
            self._deliver = deliver
            while self._early:
                deliver(self._early.popleft())

    def _take(self, message: Message, apply: Callable[[Settings], None], other: Callable[[Message], None]) -> None:
        if "settings" not in message:
            other(message)
            return
        number = message["number"]
        try:
            settings = unpack_settings(message["settings"].encode())
            apply(settings)
        except Exception as error:
            self.answer({"applied": number, "failed": f"{type(error).__name__}: {error}"})
            raise
        self.settings = settings
        self.answer({"applied": number})
