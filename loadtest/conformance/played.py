"""Playing a script through the gateway: the client's answer and the upstream's witnesses, together."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import msgspec

from loadtest.conformance.client import Answer, Client, Leave
from loadtest.scripted.script import Script
from loadtest.scripted.stage import Stage
from loadtest.scripted.witness import Witness

PATIENCE_SECONDS = 10.0


class Played(msgspec.Struct, frozen=True):
    """One request from both ends."""

    script: Script
    answer: Answer
    witnesses: list[Witness]

    @property
    def witness(self) -> Witness | None:
        """The last attempt; None where the request never reached the upstream."""
        return self.witnesses[-1] if self.witnesses else None


class Between:
    """A client before the gateway and a stage behind it."""

    def __init__(self, client: Client, stage: Stage) -> None:
        self.client = client
        self.stage = stage
        self._numbers: Iterator[int] = itertools.count(1)

    def script(self, **fields: Any) -> Script:
        """A script with an id of its own."""
        return Script(id=f"v{next(self._numbers)}", **fields)

    async def play(
        self,
        *,
        surface: str = "chat",
        stream: bool = True,
        wants_usage: bool = False,
        leave: Leave | None = None,
        headers: dict[str, str] | None = None,
        **script: Any,
    ) -> Played:
        """One request to its end."""
        asked = self.script(**script)
        answer = await self.client.ask(
            asked, surface=surface, stream=stream, usage=wants_usage, leave=leave, headers=headers
        )
        return Played(asked, answer, self.stage.attempts(asked.id))
