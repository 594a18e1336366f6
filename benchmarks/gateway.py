"""The gateway's own cost: requests per second and latency with no proxy, through nginx, and through Tokenline.

One core carries the proxy (Tokenline's relay worker and its observer, with auth, limits, ledger, metrics and tracing
on), the other the mock upstream and the load. All in one run: it is the ratios that matter.

The mock upstream is served as engines are (uvicorn) and computes nothing. What no engine can do, answering 60,000
times a second, a second upstream of bare sockets does: the ratios with it are under `bare`, as the limit.

    python benchmarks/gateway.py --json            the whole table, some minutes
    python benchmarks/gateway.py --quick           under 50 seconds
    python benchmarks/gateway.py --peers litellm   where it is installed
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
MODES = ("whole", "stream")
NGINX = """
daemon off; worker_processes 1; pid {folder}/pid; error_log {folder}/error.log crit;
events {{ worker_connections 4096; }}
http {{
  access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  keepalive_requests 1000000;
  upstream mock {{ server 127.0.0.1:{upstream}; keepalive 512; keepalive_requests 1000000; }}
  server {{
    listen 127.0.0.1:{port} backlog=2048;
    location / {{
      proxy_pass http://mock; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off; proxy_request_buffering off;
    }}
  }}
}}
"""


def free_port() -> int:
    """A port of the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(command: list[str], core: int | None, port: int, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process on one core, from the moment its port answers until the block ends."""
    pin = (lambda: os.sched_setaffinity(0, {core})) if core is not None else None
    process = subprocess.Popen(
        command, preexec_fn=pin, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT, **options
    )
    try:
        deadline = time.monotonic() + 60
        while True:
            if process.poll() is not None:
                raise SystemExit(f"{command[0]} ended with {process.returncode} before it listened on {port}")
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise SystemExit(f"{command[0]} did not listen on {port} within 60 s") from None
                time.sleep(0.05)
        yield process
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()


class Proxy:
    """Something to send load to, and the processes whose CPU time is its cost."""

    def __init__(self, port: int, path: str, key: str, processes: Callable[[], dict[str, psutil.Process]]) -> None:
        self.port = port
        self.path = path
        self.key = key
        self.processes = processes

    def cpu_seconds(self) -> dict[str, float]:
        """User and system time so far, by part."""
        return {name: sum(process.cpu_times()[:2]) for name, process in self.processes().items()}


@contextmanager
def nginx(upstream: int, core: int | None, folder: Path) -> Iterator[Proxy]:
    """nginx with buffering off."""
    port = free_port()
    config = folder / "nginx.conf"
    config.write_text(NGINX.format(folder=folder, upstream=upstream, port=port))
    binary = shutil.which("nginx") or "/usr/sbin/nginx"
    with running([binary, "-p", str(folder), "-c", str(config)], core, port):
        yield Proxy(port, "/v1/chat/completions", "none", dict)


@contextmanager
def tokenline(upstream: int, core: int | None, folder: Path, limits: str = "") -> Iterator[Proxy]:
    """`tokenline gateway` as a user starts it; `limits`: lines of [server]."""
    port, ops, otlp = free_port(), free_port(), free_port()
    config = folder / "tokenline.toml"
    config.write_text(
        f'[server]\nport = {port}\nops_port = {ops}\notlp_port = {otlp}\napi_key = "bench-key"\n{limits}'
        f'[[upstreams]]\nname = "mock"\nurl = "http://127.0.0.1:{upstream}/v1"\n'
        '[[models]]\nname = "m"\ntargets = [{ upstream = "mock" }]\n'
    )
    environ = {k: v for k, v in os.environ.items() if not k.startswith("TOKENLINE_")}
    environ["TOKENLINE_STATE_DIR"] = str(folder / "state")
    command = [str(Path(sys.executable).with_name("tokenline")), "gateway", "--config", str(config)]
    with running(command, core, port, env=environ) as process:

        def processes() -> dict[str, psutil.Process]:
            children = psutil.Process(process.pid).children(recursive=True)
            return {name: next(p for p in children if name in p.cmdline()) for name in ("worker", "observer")}

        time.sleep(1)
        yield Proxy(port, "/api/v1/chat/completions", "bench-key", processes)


@contextmanager
def litellm(upstream: int, core: int | None, folder: Path) -> Iterator[Proxy]:
    """LiteLLM's proxy, one worker."""
    binary = shutil.which("litellm")
    if binary is None:
        raise SystemExit(
            "litellm is not on PATH; it comes by: pip install 'litellm[proxy]' (in an environment of its own)"
        )
    port = free_port()
    config = folder / "litellm.yaml"
    config.write_text(
        "model_list:\n  - model_name: m\n    litellm_params:\n      model: openai/m\n"
        f"      api_base: http://127.0.0.1:{upstream}/v1\n      api_key: none\n"
        "general_settings:\n  master_key: sk-bench\n"
    )
    with running([binary, "--config", str(config), "--port", str(port)], core, port):
        yield Proxy(port, "/v1/chat/completions", "sk-bench", dict)


def measure(proxy: Proxy, mode: str, connections: int, seconds: float, core: int | None) -> dict[str, Any]:
    """One cell of the table."""
    command = [sys.executable, "-m", "benchmarks.wire", "load", "--port", str(proxy.port), "--path", proxy.path]
    command += ["--key", proxy.key, "--connections", str(connections), "--seconds", str(seconds)]
    command += ["--stream"] if mode == "stream" else []
    pin = (lambda: os.sched_setaffinity(0, {core})) if core is not None else None
    before = proxy.cpu_seconds()
    done = subprocess.run(command, preexec_fn=pin, capture_output=True, text=True, cwd=ROOT, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    after = proxy.cpu_seconds()
    spent = {name: after[name] - before[name] for name in after}
    if total := sum(spent.values()):
        result["cpu_share"] = {name: round(value / total, 3) for name, value in spent.items()}
    return result


def main() -> None:
    """Runs the table and prints it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON on standard output")
    parser.add_argument("--quick", action="store_true", help="16 connections and 1, short runs: under 50 seconds")
    parser.add_argument("--peers", nargs="*", default=[], choices=["litellm"], help="other gateways to run as well")
    parser.add_argument("--seconds", type=float, help="length of one cell")
    args = parser.parse_args()
    sweep = [1, 16] if args.quick else [1, 16, 64, 256]
    seconds = args.seconds or (1.2 if args.quick else 5.0)
    cores = sorted(os.sched_getaffinity(0))
    proxy_core, load_core = (cores[0], cores[1]) if len(cores) > 1 else (None, None)
    peers: dict[str, Any] = {"nginx": nginx, "tokenline": tokenline}
    if not (shutil.which("nginx") or Path("/usr/sbin/nginx").exists()):
        del peers["nginx"]
    peers |= {"litellm": litellm} if "litellm" in args.peers else {}
    tables = {}
    for upstream, connections in (("served", sweep), ("wire", [1, 16])):
        tables[upstream] = table_of(upstream, connections, peers, seconds, (proxy_core, load_core))
    result = {
        "proxies": tables["served"],
        "ratios": ratios(tables["served"]),
        "bare": {"proxies": tables["wire"], "ratios": ratios(tables["wire"])},
        "seconds_per_cell": seconds,
        "cores": len(cores),
    }
    print(json.dumps(result, indent=1)) if args.json else show(result)


def table_of(
    upstream: str, sweep: list[int], peers: dict[str, Any], seconds: float, cores: tuple[int | None, int | None]
) -> dict[str, Any]:
    """proxy -> mode -> connections -> cell, with one of the mock upstreams (the module that it is)."""
    proxy_core, load_core = cores
    table: dict[str, Any] = {}
    with ExitStack() as stack:
        port = free_port()
        role = ["upstream"] if upstream == "wire" else []
        command = [sys.executable, "-m", f"benchmarks.{upstream}", *role, "--port", str(port)]
        stack.enter_context(running(command, load_core, port))
        proxies = {"direct": Proxy(port, "/v1/chat/completions", "none", dict)}
        for name, start in peers.items():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"bench-{name}-")))
            proxies[name] = stack.enter_context(start(port, proxy_core, folder))
        progress = stack.enter_context(Progress(console=Console(stderr=True), transient=True))
        cells = [(mode, connections, name) for mode in MODES for connections in sweep for name in proxies]
        for mode, connections, name in progress.track(cells, description=f"measuring ({upstream})"):
            cell = measure(proxies[name], mode, connections, seconds, load_core)
            table.setdefault(name, {}).setdefault(mode, {})[str(connections)] = cell
    return table


def ratios(table: dict[str, Any]) -> dict[str, float | None]:
    """What the run is for. None where nginx is not installed."""
    ours, direct, peer = table["tokenline"], table["direct"], table.get("nginx")
    return {
        "stream_vs_nginx": ours["stream"]["16"]["rps"] / peer["stream"]["16"]["rps"] if peer else None,
        "whole_vs_nginx": ours["whole"]["16"]["rps"] / peer["whole"]["16"]["rps"] if peer else None,
        "added_p50_ms": ours["whole"]["1"]["p50_ms"] - direct["whole"]["1"]["p50_ms"],
    }


def show(result: dict[str, Any]) -> None:
    """The tables for people; under `observer` its share of Tokenline's CPU time."""
    console = Console()
    for title, part in (("an upstream as engines are", result), ("an upstream of bare sockets", result["bare"])):
        console.print(_table(title, part["proxies"]))
        for name, value in part["ratios"].items():
            console.print(f"{name}: {'unknown' if value is None else f'{value:.2f}'}")


def _table(title: str, proxies: dict[str, Any]) -> Table:
    table = Table("proxy", "mode", "conns", "req/s", "P50 ms", "P99 ms", "errors", "observer", title=title)
    for name, modes in proxies.items():
        for mode, cells in modes.items():
            for connections, cell in cells.items():
                share = f"{cell['cpu_share']['observer']:.0%}" if "cpu_share" in cell else ""
                figures = (f"{cell[key]:.2f}" for key in ("rps", "p50_ms", "p99_ms"))
                table.add_row(name, mode, connections, *figures, str(cell["errors"]), share)
    return table


if __name__ == "__main__":
    main()
