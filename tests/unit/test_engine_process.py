"""The engine core's process, from loading to its end."""

from __future__ import annotations

import gc

import pytest
from engine_support import settings_of

from backend_engine.core import process
from backend_engine.core.messages import FromCore, Ready, Shutdown, ToCore


class ShutDownMailbox:
    """A frontend that says Shutdown once the core is ready, and notes how many objects are frozen then."""

    is_stopped = False

    def __init__(self) -> None:
        self.frozen_when_ready = 0

    def send(self, message: FromCore) -> None:
        if isinstance(message, Ready):
            self.frozen_when_ready = gc.get_freeze_count()

    def receive(self, _wait_ns: int | None) -> list[ToCore]:
        return [Shutdown()]

    def close(self) -> None:
        pass


def test_a_core_is_frozen_while_it_serves_and_leaves_nothing_uncollected_at_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mailbox = ShutDownMailbox()
    monkeypatch.setattr(process, "Mailbox", lambda _in_address, _out_address: mailbox)
    settings = settings_of(engine={"device": "simulated"})
    assert process.run_core(settings, "ipc://in", "ipc://out") == 0
    assert mailbox.frozen_when_ready > 10_000
    assert gc.get_freeze_count() == 0
