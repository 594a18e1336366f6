"""Where vLLM's command is, and which version answers to it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import msgspec

from settings.errors import SettingsError
from settings.schema import EngineSettings

UDS_SINCE = (0, 12)
"""The first version whose documentation has --uds."""
ASK_SECONDS = 20
_VERSION = "import importlib.metadata as m; print(m.version('vllm'))"


class VllmCommand(msgspec.Struct, frozen=True):
    """An installed vLLM."""

    words: tuple[str, ...]
    """What `serve` and its arguments are appended to."""
    version: tuple[int, ...] | None
    """None where it would not say."""


def find_vllm(
    engine: EngineSettings,
    *,
    which: Callable[[str], str | None] = shutil.which,
    has_package: Callable[[str], object] = find_spec,
) -> VllmCommand:
    """The command of engine.vllm_executable, else of the PATH, else of this Python's package. Raises SettingsError."""
    asked = engine.vllm_executable
    found = which(str(Path(asked).expanduser()) if asked else "vllm")
    if found is not None:
        return VllmCommand((found,), version_of(_python_of(Path(found))))
    if asked:
        raise SettingsError(f"engine.vllm_executable = {asked!r}: there is no such command that can be run")
    if has_package("vllm") is not None:
        return VllmCommand((sys.executable, "-m", "vllm.entrypoints.cli.main"), version_of(sys.executable))
    raise SettingsError(
        'engine.backend = "vllm", but there is no command vllm on the PATH and no package vllm beside this Python. '
        "Install it, best in an environment of its own (pip install vllm), and name its command: "
        'engine.vllm_executable = "/opt/vllm/bin/vllm"'
    )


def check_listener(engine: EngineSettings, command: VllmCommand) -> None:
    """Raises SettingsError when this vLLM can't listen where the gateway would look for it."""
    if command.version is not None and command.version < UDS_SINCE and engine.vllm_port is None:
        version = ".".join(map(str, command.version))
        raise SettingsError(
            f"vLLM {version} may not be able to listen on a Unix socket (--uds is documented since "
            f"{'.'.join(map(str, UDS_SINCE))}): set engine.vllm_port to a free port, or take a newer version"
        )


def version_of(python: str | None) -> tuple[int, ...] | None:
    """Asks a Python for the version of its vLLM, without importing that: it would take many seconds."""
    if python is None:
        return None
    try:
        done = subprocess.run(
            [python, "-c", _VERSION], capture_output=True, text=True, timeout=ASK_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.match(r"\d+(?:\.\d+)*", done.stdout.strip())
    return tuple(int(part) for part in found[0].split(".")) if done.returncode == 0 and found else None


def _python_of(script: Path) -> str | None:
    """The Python that a console script runs under, from its first line."""
    try:
        with script.open("rb") as file:
            first = file.readline(512).decode("utf-8", "replace").strip()
    except OSError:
        return None
    words = first.removeprefix("#!").split() if first.startswith("#!") else []
    words = words[1:] if words and words[0].endswith("/env") else words
    return words[0] if words and "python" in Path(words[0]).name else None
