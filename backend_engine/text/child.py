"""What both kinds of text process have in common: command line, sockets, and an end with the parent."""

from __future__ import annotations

import argparse
import logging
import os
import resource
import signal
import sys
from pathlib import Path

import msgspec
import zmq

from backend_engine.parent import end_with_parent
from backend_engine.text.wire import Broken, Loaded, encode
from settings.schema import Settings

QUEUED_MESSAGES = 4096
"""ZeroMQ holds this many messages on either side; beyond them whoever sends waits."""


class Line:
    """To and from the frontend, in order. It ends this process by SIGTERM."""

    def __init__(self, in_address: str, out_address: str) -> None:
        self._context = zmq.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.set_hwm(QUEUED_MESSAGES)
        self._inbox.connect(in_address)
        self._outbox = self._context.socket(zmq.PUSH)
        self._outbox.set_hwm(QUEUED_MESSAGES)
        self._outbox.setsockopt(zmq.LINGER, 1000)
        self._outbox.connect(out_address)

    def receive(self) -> bytes:
        """The next message, when it comes."""
        return bytes(self._inbox.recv())

    def send(self, message: msgspec.Struct) -> None:
        """Waits while the frontend is QUEUED_MESSAGES behind."""
        self._outbox.send(encode(message))

    def close(self) -> None:
        """Sends what is still held."""
        self._inbox.close(linger=0)
        self._outbox.close()
        self._context.term()


def begin(name: str) -> tuple[Settings, Line]:
    """The first thing that a text process does."""
    end_with_parent(os.getppid())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the frontend ends this process
    parser = argparse.ArgumentParser(prog=f"python -m backend_engine.text.{name}")
    parser.add_argument("--settings", type=Path, required=True, help="JSON file of the effective settings")
    parser.add_argument("--inbox", required=True, help="ipc:// address that messages come from")
    parser.add_argument("--outbox", required=True, help="ipc:// address that answers go to")
    arguments = parser.parse_args()
    settings = Settings.model_validate_json(arguments.settings.read_bytes())
    logging.basicConfig(
        level=settings.logging.level.upper(),
        format=f"%(asctime)s %(levelname)s engine-{name} %(message)s",
        stream=sys.stderr,
    )
    return settings, Line(arguments.inbox, arguments.outbox)


def loaded(load_ns: int, tool_format: str | None = None) -> Loaded:
    """With this process's memory: its peak so far, which loading is."""
    scale = 1 if sys.platform == "darwin" else 1024
    return Loaded(load_ns, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale, tool_format)


def give_up(line: Line, error: Exception) -> int:
    """Says why this process can't work; its exit status."""
    line.send(Broken(str(error) or type(error).__name__))
    line.close()
    return 1
