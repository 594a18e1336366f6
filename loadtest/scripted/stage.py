"""The stage: what upstreams that serve one gateway have in common. It keeps the witnesses, by script."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from loadtest.scripted.witness import Witness

MAX_WITNESSES = 20_000


class Stage:
    """Witnesses of every attempt, in the order of arrival. One event loop only."""

    def __init__(self) -> None:
        self._seen: dict[str, list[Witness]] = {}
        self._changed = asyncio.Event()

    def enter(self, witness: Witness) -> None:
        """An attempt begins; it gets its number. The oldest scripts are forgotten beyond MAX_WITNESSES."""
        attempts = self._seen.setdefault(witness.script_id, [])
        attempts.append(witness)
        witness.number = len(attempts)
        if len(self._seen) > MAX_WITNESSES:
            del self._seen[next(iter(self._seen))]
        self.changed()

    def changed(self) -> None:
        """Something was written down: whoever waits looks again."""
        self._changed.set()

    def attempts(self, script_id: str) -> list[Witness]:
        """What has been seen of a script so far."""
        return self._seen.get(script_id, [])

    async def until(self, script_id: str, true: Callable[[Witness], bool], *, seconds: float = 10) -> Witness:
        """The last attempt at the script, as soon as the condition holds for it. Raises TimeoutError."""
        async with asyncio.timeout(seconds):
            while not ((seen := self.attempts(script_id)) and true(seen[-1])):
                self._changed.clear()
                await self._changed.wait()
        return seen[-1]
