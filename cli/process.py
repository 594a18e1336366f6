"""One child process: started with its settings on a pipe, asked to end, made to end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence


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
        try:
            said = self._from_child.read(65536) or b""
            return str(json.loads(said.splitlines()[0])["failed"])
        except (BlockingIOError, ValueError, IndexError, KeyError):
            return None

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
