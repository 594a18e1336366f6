"""The engine core as a process: `python -m backend_engine.core.process --settings FILE --inbox ADDR --outbox ADDR`.

The frontend binds both ipc:// addresses (PUSH to the inbox, PULL from the outbox) and the core connects, so a core
that is started again meets the same sockets. It says Ready or Failed first, then Outputs. It ends on Shutdown, on
SIGTERM, and with its parent.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import secrets
import signal
import socket
import sys
from functools import partial
from pathlib import Path

import msgspec
import zmq

from backend_engine.core.forward import start_forward
from backend_engine.core.loop import EngineCore
from backend_engine.core.messages import Failed, FromCore, ToCore, decode_to_core, encode
from backend_engine.devices.opening import open_device
from backend_engine.parent import end_with_parent
from settings.schema import Settings
from tracing.clock import SystemClock

log = logging.getLogger(__name__)

INBOX_MESSAGES = 4096
"""ZeroMQ holds this many messages to the core; beyond them the frontend's send waits."""
OUTBOX_MESSAGES = 4096
"""ZeroMQ holds this many messages of the core; beyond them the core waits, and no step runs that nobody reads."""


class Mailbox:
    """Both sockets, and what can wake a core that sleeps: a message or a signal."""

    def __init__(self, in_address: str, out_address: str) -> None:
        self._context = zmq.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.set_hwm(INBOX_MESSAGES)
        self._inbox.connect(in_address)
        self._outbox = self._context.socket(zmq.PUSH)
        self._outbox.set_hwm(OUTBOX_MESSAGES)
        self._outbox.setsockopt(zmq.LINGER, 1000)
        self._outbox.connect(out_address)
        self._signal_seen, signal_end = socket.socketpair()
        self._signal_seen.setblocking(False)
        signal_end.setblocking(False)
        self._signal_end = signal_end
        self.is_stopped = False
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the frontend ends the core
        signal.set_wakeup_fd(signal_end.fileno(), warn_on_full_buffer=False)
        self._poller = zmq.Poller()
        self._poller.register(self._inbox, zmq.POLLIN)
        self._poller.register(self._signal_seen, zmq.POLLIN)

    def receive(self, wait_ns: int | None) -> list[ToCore]:
        """All messages that are here; sleeps until one comes, a signal does, or `wait_ns` are over (None: no limit)."""
        if not self.is_stopped:
            self._poller.poll(None if wait_ns is None else -(-wait_ns // 1_000_000))
        found: list[ToCore] = []
        while not self.is_stopped and len(found) < INBOX_MESSAGES:
            try:
                found.append(decode_to_core(self._inbox.recv(zmq.NOBLOCK)))
            except zmq.Again:
                break
            except msgspec.DecodeError as error:
                log.error("a message that is none of the frontend's was dropped: %s", error)
        return found

    def send(self, message: FromCore) -> None:
        """Sends; waits while the frontend is OUTBOX_MESSAGES behind. A message that SIGTERM overtakes is dropped."""
        data = encode(message)
        while not self.is_stopped:
            try:
                return self._outbox.send(data, zmq.NOBLOCK)
            except zmq.Again:
                self._outbox.poll(100, zmq.POLLOUT)
        return None

    def close(self) -> None:
        """Sends what is still held, for at most a second."""
        signal.set_wakeup_fd(-1)
        self._inbox.close(linger=0)
        self._outbox.close()
        self._context.term()
        self._signal_seen.close()
        self._signal_end.close()

    def _stop(self, _signal: int, _frame: object) -> None:
        self.is_stopped = True


def run_core(settings: Settings, in_address: str, out_address: str) -> int:
    """Runs a core until it is told to end; returns the process's exit status."""
    clock = SystemClock()
    mailbox = Mailbox(in_address, out_address)
    try:
        has_thread = settings.token_interval.async_scheduling
        forward = start_forward(partial(open_device, settings, clock), has_thread=has_thread)
        core = EngineCore(forward, settings, clock, draw_seed=lambda: secrets.randbits(63))
    except Exception as error:
        log.error("the engine cannot serve: %s", error, exc_info=not isinstance(error, ValueError))
        mailbox.send(Failed(str(error) or type(error).__name__))
        mailbox.close()
        return 1
    gc.collect()
    gc.freeze()  # a model's modules live as long as the process: no collection need look at them between two steps
    mailbox.send(core.info)
    while not mailbox.is_stopped and not core.is_shut_down:
        for message in mailbox.receive(core.wait_ns()):
            core.take(message)
        while (slack_ms := core.slack_ns() // 1_000_000) and not mailbox.is_stopped:
            for message in mailbox.receive(slack_ms * 1_000_000):
                core.take(message)
        said = core.turn()
        if said is not None:
            mailbox.send(said)
    core.close()
    mailbox.close()
    gc.unfreeze()  # what is never collected is told as leaked by libraries that count at the end (Triton's nanobind)
    return 0


def _use_threads() -> None:
    """As many as there are cores for this process; the device may use one fewer. OMP_NUM_THREADS overrides."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(cores))  # read by torch when it is imported


def main() -> int:
    """Reads the command line and runs a core."""
    end_with_parent(os.getppid())
    parser = argparse.ArgumentParser(prog="python -m backend_engine.core.process", description=__doc__)
    parser.add_argument("--settings", type=Path, required=True, help="JSON file of the effective settings")
    parser.add_argument("--inbox", required=True, help="ipc:// address that messages come from")
    parser.add_argument("--outbox", required=True, help="ipc:// address that outputs go to")
    arguments = parser.parse_args()
    settings = Settings.model_validate_json(arguments.settings.read_bytes())
    logging.basicConfig(
        level=settings.logging.level.upper(),
        format="%(asctime)s %(levelname)s engine-core %(message)s",
        stream=sys.stderr,
    )
    _use_threads()
    return run_core(settings, arguments.inbox, arguments.outbox)


if __name__ == "__main__":
    sys.exit(main())
