"""A Prometheus for a short while: on a free port, in a folder of its own, asked by its HTTP API."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

READY_SECONDS = 30.0
END_SECONDS = 10.0
POINTS = 60


class PrometheusMissing(Exception):
    """There is no Prometheus on this machine."""


class QueryFailed(Exception):
    """What Prometheus said to a query."""


class Prometheus:
    """A running one."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=f"{url}/api/v1", timeout=30, trust_env=False)

    def ask(self, path: str, **parameters: Any) -> Any:
        """The `data` of an answer. Raises QueryFailed."""
        try:
            answer = self._http.post(path, data=parameters) if parameters else self._http.get(path)
            body = answer.json()
        except (httpx.HTTPError, ValueError) as error:
            raise QueryFailed(f"{type(error).__name__}: {error}") from error
        if body.get("status") != "success":
            raise QueryFailed(str(body.get("error")))
        return body["data"]

    def instant(self, expr: str, at: float) -> list[dict[str, Any]]:
        """Series with one sample each; a scalar or a string is one series without labels."""
        data = self.ask("/query", query=expr, time=at)
        if data["resultType"] in ("scalar", "string"):
            return [{"metric": {}, "value": data["result"]}]
        return list(data["result"])

    def line(self, expr: str, start: float, end: float) -> list[dict[str, Any]]:
        """Series of POINTS samples."""
        step = max(1.0, (end - start) / POINTS)
        return list(self.ask("/query_range", query=expr, start=start, end=end, step=step)["result"])


def prometheus_program() -> str:
    """Its path. Raises PrometheusMissing with the way to get it."""
    found = shutil.which("prometheus")
    if found is None:
        raise PrometheusMissing(
            "there is no `prometheus` on the PATH (Debian and Ubuntu: apt-get install prometheus; 2.42 or newer)"
        )
    return found


@contextmanager
def running_prometheus(configuration: Path, data: Path) -> Iterator[Prometheus]:
    """Runs one until the block ends. Raises RuntimeError when it does not come up."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        prometheus_program(),
        f"--config.file={configuration}",
        f"--storage.tsdb.path={data}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--enable-feature=exemplar-storage",
        "--log.level=warn",
    ]
    log = data.with_suffix(".log")
    with log.open("wb") as stderr:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stderr, stderr=stderr, cwd=log.parent)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_ready(process, url, log)
        yield Prometheus(url)
    finally:
        process.terminate()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"Prometheus ended at once: {log.read_text()[-500:].strip()}")
        try:
            if httpx.get(f"{url}/-/ready", timeout=1, trust_env=False).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise RuntimeError(f"Prometheus was not ready in {READY_SECONDS:g} s: {log.read_text()[-500:].strip()}")
