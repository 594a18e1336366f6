"""An engine process of a test: started, spoken to over its socket, and gone afterwards."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from settings.schema import EngineSettings, ServerSettings, Settings, SimulatedSettings

_PROGRAM = """
import sys
from pathlib import Path
from backend_engine.server import run_engine
from settings.transfer import unpack_settings
settings = unpack_settings(sys.stdin.buffer.readline())
run_engine(settings, socket=settings.engine_socket if sys.argv[1] == "socket" else None)
"""
PATIENCE_SECONDS = 20.0


def engine_settings(state_dir: Path, *, forward_ms: float = 20, **sections: Any) -> Settings:
    """A simulated device with known times."""
    defaults: dict[str, Any] = {
        "engine": EngineSettings(device="simulated"),
        "simulated": SimulatedSettings(forward_ms=forward_ms),
        "server": ServerSettings(drain_seconds=5),
    }
    return Settings(state_dir=state_dir, **defaults | sections)


class EngineProcess:
    """A running engine."""

    def __init__(self, process: subprocess.Popen[bytes], settings: Settings, *, is_alone: bool) -> None:
        self.process = process
        self.settings = settings
        self.base_url = f"http://127.0.0.1:{settings.server.port}" if is_alone else "http://engine"
        self._socket = None if is_alone else str(settings.engine_socket)
        self.errors = ""

    def client(self) -> httpx.Client:
        return httpx.Client(transport=httpx.HTTPTransport(uds=self._socket), base_url=self.base_url, timeout=20)

    def async_client(self) -> httpx.AsyncClient:
        transport = httpx.AsyncHTTPTransport(uds=self._socket)
        return httpx.AsyncClient(transport=transport, base_url=self.base_url, timeout=20)

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.output()
        try:
            with self.client() as client:
                return client.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def core(self) -> psutil.Process:
        """The core's process."""
        return self.child("backend_engine.core.process")

    def child(self, module: str) -> psutil.Process:
        """The child process that runs this module."""
        children = psutil.Process(self.process.pid).children()
        return next(child for child in children if module in child.cmdline())

    def metrics(self) -> dict[str, float]:
        """The metrics page: series name with labels -> value."""
        with self.client() as client:
            lines = client.get("/metrics").text.splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}

    def ended(self) -> int:
        """Waits for the process to end by itself; its exit status."""
        self.process.wait(PATIENCE_SECONDS)
        return self.process.returncode

    def output(self) -> str:
        """What it wrote on stderr, once it has ended."""
        if not self.errors and self.process.stderr is not None:
            self.errors = self.process.stderr.read().decode()
        return self.errors


def until(condition: Callable[[], Any], what: str, within_s: float = PATIENCE_SECONDS) -> None:
    """Waits until a condition holds."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.02)


@contextmanager
def started(
    settings: Settings, *, is_alone: bool = False, env: dict[str, str] | None = None
) -> Iterator[EngineProcess]:
    """An engine that may or may not come up."""
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, "alone" if is_alone else "socket"],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=env,
    )
    assert process.stdin is not None
    from settings.transfer import pack_settings

    process.stdin.write(pack_settings(settings) + b"\n")
    process.stdin.close()
    engine = EngineProcess(process, settings, is_alone=is_alone)
    try:
        yield engine
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        engine.output()
        assert process.stderr is not None
        process.stderr.close()


@contextmanager
def running(
    settings: Settings,
    *,
    is_alone: bool = False,
    env: dict[str, str] | None = None,
    ready_s: float = PATIENCE_SECONDS,
) -> Iterator[EngineProcess]:
    """An engine that serves."""
    with started(settings, is_alone=is_alone, env=env) as engine:
        until(engine.is_ready, "the engine is ready", ready_s)
        yield engine
