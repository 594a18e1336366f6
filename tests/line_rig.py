"""The whole line, as a user starts it: `tokenline up`, on free ports and in a folder of its own."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

TOKENLINE = str(Path(sys.executable).with_name("tokenline"))


def free_ports(count: int) -> list[int]:
    """Distinct TCP ports of the loopback interface that nobody listens on."""
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


class Line:
    """A running `tokenline up`."""

    def __init__(self, process: subprocess.Popen[bytes], environ: dict[str, str], facts: dict[str, Any]) -> None:
        self.process = process
        self.environ = environ
        self.facts = facts
        self.base_url: str = facts["base_url"]
        self.origin = self.base_url.removesuffix("/api")
        self.key: str = facts["key"]
        self.model: str = facts["model"]
        self.ops_url: str = facts["ops_url"]
        self.client = httpx.Client(base_url=self.base_url, headers={"authorization": f"Bearer {self.key}"}, timeout=120)

    def chat(self, **fields: Any) -> httpx.Response:
        body = {"model": self.model, "messages": [{"role": "user", "content": "hi"}], **fields}
        return self.client.post("/v1/chat/completions", json=body)

    def tokenline(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs the command line against this line."""
        command = [TOKENLINE, *arguments]
        return subprocess.run(command, env=self.environ, capture_output=True, text=True, timeout=60, check=False)

    def why(self, some_id: str, wait_s: float = 5) -> dict[str, Any]:
        """`tokenline why ID --json`, once the request's end has reached the observer."""
        deadline = time.monotonic() + wait_s
        while True:
            done = self.tokenline("why", some_id, "--json")
            if done.returncode == 0:
                found: dict[str, Any] = json.loads(done.stdout)
                return found
            if time.monotonic() > deadline:
                raise AssertionError(f"why {some_id}: {done.stdout}{done.stderr}")
            time.sleep(0.1)

    def metrics(self, openmetrics: bool = False) -> str:
        accept = "application/openmetrics-text" if openmetrics else "text/plain"
        return httpx.get(self.ops_url + "/metrics", headers={"accept": accept}).text

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples with this name and these labels; 0 where there is none."""
        total = 0.0
        for line in self.metrics().splitlines():
            if line.startswith((name + "{", name + " ")) and all(f'{k}="{v}"' in line for k, v in labels.items()):
                total += float(line.rsplit(" ", 1)[1])
        return total

    def counted(self) -> dict[str, float]:
        """Every sample that may only grow, by name and labels: counters, and histograms' buckets, counts and sums."""
        return {
            f"{sample.name}{sorted(sample.labels.items())}": sample.value
            for family in text_string_to_metric_families(self.metrics())
            if family.type in ("counter", "histogram")
            for sample in family.samples
        }

    def until_metric(self, wanted: float, name: str, wait_s: float = 10, **labels: str) -> float:
        """Waits until the metric has at least this value."""
        deadline = time.monotonic() + wait_s
        while (value := self.metric(name, **labels)) < wanted and time.monotonic() < deadline:
            time.sleep(0.1)
        assert value >= wanted, (name, labels, value, wanted)
        return value

    def processes(self) -> list[psutil.Process]:
        """The supervisor and all that it started."""
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]

    def child(self, word: str) -> psutil.Process:
        """The process whose command line has this word."""
        return next(p for p in self.processes()[1:] if word in p.cmdline())


@contextmanager
def line(tmp_path: Path, *arguments: str, ready_s: float = 60, **environ: str) -> Iterator[Line]:
    """Starts `tokenline up`, waits until it says that it is ready, ends it and proves that no process is left."""
    tenant, ops, otlp = free_ports(3)
    variables = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("TOKENLINE_", "OTEL_"))},
        "TOKENLINE_STATE_DIR": str(tmp_path / "state"),
        "TOKENLINE_SERVER__PORT": str(tenant),
        "TOKENLINE_SERVER__OPS_PORT": str(ops),
        "TOKENLINE_SERVER__OTLP_PORT": str(otlp),
        "HF_HUB_OFFLINE": "1",
        **environ,
    }
    log = tmp_path / "up.log"
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [TOKENLINE, "up", "--json", *arguments],
            env=variables, stdout=subprocess.PIPE, stderr=stderr, cwd=tmp_path,
        )  # fmt: skip
    try:
        assert process.stdout is not None
        readable, _, _ = select.select([process.stdout], [], [], ready_s)
        first = process.stdout.readline() if readable else b""
        assert first, f"not ready within {ready_s} s:\n{log.read_text()[-3000:]}"
        found = Line(process, variables, json.loads(first))
        everyone = found.processes()
        yield found
        everyone = {p.pid: p for p in [*everyone, *found.processes()]}.values()
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    _, alive = psutil.wait_procs(list(everyone), timeout=5)
    assert not alive, f"left behind: {alive}"
