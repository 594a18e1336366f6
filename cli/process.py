"""One child process: started with its settings on a pipe, talked to over it, asked to end, made to end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from settings.feed import Message

PIPE_BYTES = 65536
MAX_LINE_BYTES = 2**20


class ChildProcess:
    """A running child, leader of a session of its own: a Ctrl-C in the terminal reaches the supervisor alone."""

    def __init__(self, command: Sequence[str], settings_line: bytes) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to_child, self._from_child = self._process.stdin, self._process.stdout
        os.set_blocking(self._from_child.fileno(), False)
        # A child that died at once is found at the next look.
        with contextlib.suppress(BrokenPipeError):
            self._to_child.write(settings_line + b"\n")
        # From here on nobody waits for a child that does not read.
        os.set_blocking(self._to_child.fileno(), False)
        self._unsent = bytearray()
        self._unread = bytearray()
        self._failure: str | None = None

    @property
    def pid(self) -> int:
        """Process id, and id of its group."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it. What it had started is ended with it."""
        if self._process.returncode is None:
            # Its group is swept while its pid is still taken, so that no stranger can be hit.
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return None
            self.kill()
            self._process.wait()
            self._to_child.close()
        return self._process.returncode

    def failure(self) -> str | None:
        """The reason that it left, once it has ended."""
        self.messages()
        return self._failure

    def send(self, message: Message) -> None:
        """Tells it something; what its pipe has no room for goes with the next call of `messages`."""
        self._unsent += json.dumps(message).encode() + b"\n"
        self._push()

    def messages(self) -> list[Message]:
        """What it has said since the last time. Call it now and then."""
        self._push()
        while piece := self._from_child.read(PIPE_BYTES):
            self._unread += piece
        *lines, rest = bytes(self._unread).split(b"\n")
        self._unread = bytearray(rest[-MAX_LINE_BYTES:])
        found = []
        for line in lines:
            try:
                message = json.loads(line)
            except ValueError:
                continue  # a library of the child's wrote there
            if isinstance(message, dict):
                self._failure = str(message["failed"]) if message.keys() == {"failed"} else self._failure
                found.append(message)
        return found

    def _push(self) -> None:
        try:
            while self._unsent and (taken := self._to_child.write(self._unsent[:PIPE_BYTES])):
                del self._unsent[:taken]
        except (BrokenPipeError, ValueError):  # it has ended: what it was told, its successor is started with
            self._unsent.clear()

    def terminate(self) -> None:
        """Asks it to end in order."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Ends it and everything in its group. Only before its end was taken note of: then the pid may be another's."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


def child_command(role: str) -> tuple[str, ...]:
    """The command of a role of `cli.child`."""
    return (sys.executable, "-m", "cli.child", role, str(os.getpid()))
