"""A Tokenline for a short while, on free ports, in a temporary folder: a gateway in front of one upstream, or a whole
line with the simulated engine."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cli.bootstrap import read_key_file
from cli.errors import CliError

READY_SECONDS = 60.0
END_SECONDS = 15.0


@dataclass(frozen=True)
class TemporaryGateway:
    """How to reach it."""

    base_url: str
    key: str
    ops_url: str
    admin_key: str
    upstream_port: int
    """Of the loopback interface; its upstream is expected there."""


@contextmanager
def temporary_gateway(model: str) -> Iterator[TemporaryGateway]:
    """Runs `tokenline gateway` until the block ends. Raises CliError when it does not become ready."""
    with tempfile.TemporaryDirectory(prefix="tokenline-verify-") as folder:
        tenant, ops, otlp, upstream = _free_ports(4)
        config = Path(folder) / "tokenline.toml"
        config.write_text(
            f"[server]\nport = {tenant}\nops_port = {ops}\notlp_port = {otlp}\n"
            # Nobody sends spans here: figures need not wait for them.
            "[tracing]\njoin_wait_ms = 200\n"
            f'[[upstreams]]\nname = "scripted"\nurl = "http://127.0.0.1:{upstream}/v1"\n'
            f'[[models]]\nname = "{model}"\ntargets = [{{ upstream = "scripted" }}]\n'
        )
        with _running("gateway", config) as (facts, admin_key):
            yield TemporaryGateway(facts["base_url"], facts["key"], facts["ops_url"], admin_key, upstream)


@dataclass(frozen=True)
class TemporaryLine:
    """How to reach it."""

    base_url: str
    key: str
    ops_url: str
    admin_key: str
    models: tuple[str, ...]
    """The engine's, and one that tries an upstream first that nobody listens at."""


@contextmanager
def temporary_line() -> Iterator[TemporaryLine]:
    """Runs `tokenline up` with the simulated engine until the block ends. Raises CliError when it isn't ready."""
    with tempfile.TemporaryDirectory(prefix="tokenline-line-") as folder:
        tenant, ops, otlp, dead = _free_ports(4)
        config = Path(folder) / "tokenline.toml"
        config.write_text(
            f"[server]\nport = {tenant}\nops_port = {ops}\notlp_port = {otlp}\n"
            '[engine]\ndevice = "simulated"\nserved_name = "simulated"\n'
            "[simulated]\nforward_ms = 6\n"
            # Fewer slots than the load has users: some wait.
            "[scheduler]\nmax_num_seqs = 4\n"
            f'[[upstreams]]\nname = "dead"\nurl = "http://127.0.0.1:{dead}/v1"\n'
            '[[models]]\nname = "simulated"\ntargets = [{ upstream = "engine" }]\n'
            '[[models]]\nname = "fallback"\n'
            'targets = [{ upstream = "dead" }, { upstream = "engine", model = "simulated", priority = 1 }]\n'
        )
        with _running("up", config) as (facts, admin_key):
            yield TemporaryLine(facts["base_url"], facts["key"], facts["ops_url"], admin_key, ("simulated", "fallback"))


@contextmanager
def _running(verb: str, config: Path) -> Iterator[tuple[dict[str, str], str]]:
    """A `tokenline` with its state beside its configuration: what it says when it is ready, and its admin key."""
    state = config.parent / "state"
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("TOKENLINE_", "OTEL_"))}
    environ["TOKENLINE_STATE_DIR"] = str(state)
    log = config.parent / "log"
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-c", "from cli.main import main; main()", verb, "--json", "--config", config],
            env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr, cwd=config.parent,
        )  # fmt: skip
    try:
        facts = _facts(process, log)
        admin_key = read_key_file(state / "admin-key")
        if admin_key is None:
            raise CliError(f"the gateway left no admin key in {state}")
        yield facts, admin_key
    finally:
        _end(process)


def _facts(process: subprocess.Popen[bytes], log: Path) -> dict[str, str]:
    """The line that it prints when it is ready."""
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], READY_SECONDS)
    line = process.stdout.readline() if readable else b""
    if not line:
        raise CliError(f"the gateway did not become ready: {log.read_text()[-500:].strip()}")
    facts: dict[str, str] = json.loads(line)
    return facts


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _free_ports(count: int) -> list[int]:
    """Distinct TCP ports of the loopback interface that nobody listens on."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()
