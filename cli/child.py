"""One process of Tokenline under the supervisor: `python -m cli.child ROLE PARENT_PID`.

Standard input brings the settings in one line (so no secret is in an argument), later what a reload makes of them, and
stays open: its end means that the supervisor is gone, and this process ends with all that it started, kill -9 of the
supervisor included. The pipe on standard output takes what is said to the supervisor, such as one line that says why
this process could not go on; prints go to standard error.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import logging
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence

from settings.errors import SettingsError
from settings.feed import Feed, Message
from settings.transfer import unpack_settings

ROOMS = ("settings", "protocol", "tracing", "gateway", "backend_engine", "dashboards", "cli")
CHATTY_LOGGERS = ("httpx", "uvicorn.error")
"""A line for every health check, or for every start: no news to an operator."""
_PR_SET_PDEATHSIG = 1
_OWN_NAME = re.compile(r"^tokenline \w+: ")


class Control:
    """This process's end of the two pipes to the supervisor."""

    def __init__(self, parent_pid: int) -> None:
        _die_with(parent_pid)
        self._from_parent = os.dup(0)
        self._to_parent = os.dup(1)
        self._lock = threading.Lock()
        self._early: list[Message] = []
        """Messages that came before anybody listened."""
        self._heard: Callable[[Message], None] = self._early.append
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        os.dup2(2, 1)

    def receive(self) -> bytes:
        """The line that the supervisor sent; from then on the pipe is watched for messages and its end."""
        read = bytearray()
        while b"\n" not in read:
            piece = os.read(self._from_parent, 65536)
            if not piece:
                sys.exit("the supervisor ended before it sent the settings")
            read += piece
        line, _, more = bytes(read).partition(b"\n")
        threading.Thread(target=self._hear_to_the_end, args=(more,), name="supervisor-watch", daemon=True).start()
        # The thread ends the whole group; the kernel's signal would end this process first and leave the others.
        _set_parent_death_signal(0)
        return line

    def hear(self, heard: Callable[[Message], None]) -> None:
        """From now on messages of the supervisor go there, on a thread of their own; first those that came before."""
        with self._lock:
            self._heard = heard
            for message in self._early:
                heard(message)

    def tell(self, message: Message) -> None:
        """Says something to the supervisor."""
        os.write(self._to_parent, json.dumps(message).encode() + b"\n")

    def tell_failure(self, message: str) -> None:
        """Leaves the reason for the supervisor to read."""
        self.tell({"failed": message})

    def _hear_to_the_end(self, unread: bytes) -> None:
        piece = b""
        while True:
            *lines, unread = (unread + piece).split(b"\n")
            for line in lines:
                with self._lock:
                    self._heard(json.loads(line))
            if not (piece := os.read(self._from_parent, 65536)):
                break
        if os.getpgid(0) == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


def _die_with(parent_pid: int) -> None:
    """Covers the time until the pipe is watched: the kernel ends this process with its parent (Linux)."""
    _set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit("the supervisor is gone")


def _set_parent_death_signal(number: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def _run_worker(feed: Feed, number: int = 0) -> None:
    from gateway.worker import run_worker

    run_worker(feed, worker=number)


def _run_observer(feed: Feed) -> None:
    from dashboards.console import console
    from gateway.admin import keys_router
    from tracing.observer.process import run_observer

    admin_key = feed.settings.server.admin_key
    assert admin_key is not None, "the supervisor sends the admin key"
    key_hash = hashlib.sha256(admin_key.get_secret_value().encode()).digest()
    keys = keys_router(lambda: feed.settings)
    run_observer(feed, admin_key_hash=key_hash, routers=(keys,), pages=console(admin_key_hash=key_hash))


def _run_engine(feed: Feed) -> None:
    settings = feed.settings
    if settings.engine.backend == "vllm":
        from backend_engine.backends.vllm_process import run_vllm

        run_vllm(settings, settings.engine_unix_socket, is_alone=False)
        return
    from backend_engine.server import run_engine

    run_engine(settings, socket=settings.engine_socket)


def _run_engine_alone(feed: Feed) -> None:
    settings = feed.settings
    if settings.engine.backend == "vllm":
        from backend_engine.backends.vllm_process import run_vllm

        run_vllm(settings, None, is_alone=True)
        return
    from backend_engine.server import run_engine

    run_engine(settings, socket=None)


ROLES: dict[str, Callable[[Feed], None]] = {
    "worker": _run_worker,
    "observer": _run_observer,
    "engine": _run_engine,
    "engine-alone": _run_engine_alone,
}


def _over_spinner() -> str:
    """On a terminal, what clears the line that the supervisor's spinner may stand on."""
    return "\r\x1b[K" if sys.stderr.isatty() else ""


def run_role(role: Callable[[Feed], None], control: Control) -> int:
    """Runs one role to its end. Gives the exit code; the reason of a failure went to the supervisor."""
    try:
        settings = unpack_settings(control.receive())
        feed = Feed(settings, control.tell)
        control.hear(feed.put)
        logging.basicConfig(
            level=settings.logging.level.upper(),
            stream=sys.stderr,
            format=f"{_over_spinner()}%(asctime)s %(levelname)s %(name)s: %(message)s",
        )
        for name in CHATTY_LOGGERS:
            logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))
        role(feed)
    except KeyboardInterrupt:
        return 130
    except SystemExit as end:
        reason = end.code if isinstance(end.code, str) else end.__context__
        if end.code and reason:
            control.tell_failure(_OWN_NAME.sub("", str(reason)))
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception as error:
        ours = isinstance(error, SettingsError) or type(error).__module__.split(".")[0] in ROOMS
        if not ours:
            traceback.print_exc()
        control.tell_failure(str(error) if ours else f"{type(error).__name__}: {error}")
        return 1
    return 0


def main(argv: Sequence[str] = tuple(sys.argv)) -> int:
    """ROLE (of the workers after the first: worker:NUMBER) and the supervisor's pid."""
    _, role, parent_pid = argv
    name, _, number = role.partition(":")
    run = functools.partial(_run_worker, number=int(number)) if number else ROLES[name]
    return run_role(run, Control(int(parent_pid)))


if __name__ == "__main__":
    sys.exit(main())
