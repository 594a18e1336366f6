"""The engine core's process, from loading to its end."""

from __future__ import annotations

import gc
import signal
import threading
from concurrent.futures import Future

import pytest
from engine_support import settings_of, simulated

from backend_engine.core import forward, process
from backend_engine.core.forward import start_forward
from backend_engine.core.messages import FromCore, Ready, Shutdown, ToCore
from backend_engine.core.step import Device


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


class AwaitedFuture(Future[Device]):
    """Says when it is waited for."""

    awaited = threading.Event()

    def result(self, timeout: float | None = None) -> Device:
        self.awaited.set()
        return super().result(timeout)


def test_an_interrupt_while_the_device_opens_ends_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "Future", AwaitedFuture)
    device = simulated(settings_of())[0].core._device
    is_interrupted = threading.Event()

    def opens() -> Device:
        assert AwaitedFuture.awaited.wait(10)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        assert is_interrupted.wait(10)
        return device

    def interrupt(*_: object) -> None:
        is_interrupted.set()
        raise KeyboardInterrupt

    before, handler = threading.active_count(), signal.signal(signal.SIGINT, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            start_forward(opens, has_thread=True)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert threading.active_count() == before
