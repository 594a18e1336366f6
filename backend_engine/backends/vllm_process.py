"""Runs `vllm serve` as a child of this process: passes its log on, ends it in order, says why it ended."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from backend_engine.backends.vllm_command import check_listener, find_vllm
from backend_engine.backends.vllm_flags import VllmPlan, inherited_by_vllm, plan_of
from settings.errors import SettingsError
from settings.schema import Settings
from tracing.clock import host_identity

log = logging.getLogger(__name__)

KEPT_LOG_BYTES = 16_384
HIDDEN = "(hidden)"
SEE_ABOVE = "See root cause above"
"""vLLM's last error names none of its reasons; a line before it does."""


class BackendError(Exception):
    """vLLM ended by itself."""


def run_vllm(settings: Settings, socket: Path | None, *, is_alone: bool) -> None:
    """Until SIGTERM or SIGINT. Exits with status 1 and one line that says why when vLLM ends before that."""
    try:
        command = find_vllm(settings.engine)
        if socket is not None:
            check_listener(settings.engine, command)
            socket.unlink(missing_ok=True)  # vLLM binds it and takes no notice of one that was left behind
        inherited = inherited_by_vllm(os.environ)
        plan = plan_of(settings, socket, host=host_identity(), inherited=inherited, is_alone=is_alone)
        words = (*command.words, "serve", *plan.arguments)
        log.info("starting %s", shell_line(words, plan))
        _VllmProcess(words, {**inherited, **plan.environment}).run()
    except (SettingsError, BackendError) as error:
        raise SystemExit(f"tokenline engine: {error}") from None


def shell_line(words: tuple[str, ...], plan: VllmPlan) -> str:
    """What a shell would be told, secrets hidden."""
    shown = shown_environment(plan)
    settings = " ".join(f"{name}={shlex.quote(value)}" for name, value in shown.items())
    return f"env {settings} {shlex.join(words)}"


def shown_environment(plan: VllmPlan) -> Mapping[str, str]:
    """The plan's environment, secrets hidden."""
    return {name: HIDDEN if name in plan.secret else value for name, value in plan.environment.items()}


class _VllmProcess:
    """One life of vLLM. It stays in this process's group, so that what kills the group takes it and its workers."""

    def __init__(self, words: tuple[str, ...], environment: Mapping[str, str]) -> None:
        self._is_asked = False
        try:
            self._process = subprocess.Popen(
                words, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
        except OSError as error:
            raise BackendError(f"{words[0]} can't be run: {error.strerror}") from None
        self._tail = bytearray()

    def run(self) -> None:
        """Raises BackendError when it ends unasked."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._end)
        assert self._process.stdout is not None
        passing = threading.Thread(target=self._pass_on, args=(self._process.stdout,), name="vllm-log", daemon=True)
        passing.start()
        status = self._process.wait()
        passing.join(1)  # a worker of vLLM that outlives it may hold the pipe
        if not self._is_asked:
            raise BackendError(f"vllm serve ended ({_ending(status)}){self._last_words(status)}")

    def _end(self, _number: int, _frame: object) -> None:
        self._is_asked = True
        self._process.terminate()

    def _pass_on(self, out: IO[bytes]) -> None:
        while piece := os.read(out.fileno(), 65536):
            sys.stderr.buffer.write(piece)
            sys.stderr.buffer.flush()
            self._tail += piece
            del self._tail[:-KEPT_LOG_BYTES]

    def _last_words(self, status: int) -> str:
        """The last line that names an error. A process that a signal ended had no last word of its own."""
        lines = [line.strip() for line in self._tail.decode("utf-8", "replace").splitlines() if line.strip()]
        told = next((line for line in reversed(lines) if "Error" in line and SEE_ABOVE not in line), None)
        if told is None and status >= 0:
            told = lines[-1] if lines else None
        return f"; its log says: {told[:500]}" if told else ""


def _ending(status: int) -> str:
    if status >= 0:
        return f"exit code {status}"
    return signal.Signals(-status).name if -status in signal.valid_signals() else f"signal {-status}"
