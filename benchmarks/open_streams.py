"""Thousands of streams that are open and mostly silent: what they cost one relay worker, and how late an event is.

2,000 streams of one event per 2 seconds each, straight to the upstream and through `tokenline gateway` with one worker.
The upstream puts the time into each event as it writes it, the client compares it with its own as it reads it (one
machine, one clock), so a delay has both sides' own scheduling in it: nothing is subtracted, and the direct figures say
how much of it is theirs. One core carries the worker and its observer, the other upstream and clients. Where other
work keeps the machine busy, its delays are in the figures, too: `chrt -r 5` before the command (as root) keeps it away.

    python benchmarks/open_streams.py --json
    python benchmarks/open_streams.py --streams 500 --seconds 5
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

if not __package__:  # run as a file, whose folder has a gateway.py, and not as a module
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.gateway import ROOT, free_port, running, tokenline
from benchmarks.open_clients import OPENING_PER_SECOND

RSS_LIMIT_MB = 300.0
P99_LIMIT_MS = 5.0
SPARE_FILES = 200
FOR_EVER = 10**9
"""Events of a stream: more than anybody waits for."""


def main() -> None:
    """Measures and prints; exit code 1 where a limit is exceeded or a stream was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON on standard output")
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=20, help="how long events are counted")
    parser.add_argument("--interval", type=float, default=2, help="seconds between two events of a stream")
    args = parser.parse_args()
    check_files(2 * args.streams + SPARE_FILES)
    result = measure(args.streams, args.seconds, args.interval)
    print(json.dumps(result, indent=1)) if args.json else show(result)
    raise SystemExit(0 if result["ok"] else 1)


def check_files(needed: int) -> None:
    """Leaves with an explanation where no worker could have both sides of every stream open."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise SystemExit(
            f"the worker needs {needed} open files, which it takes by itself, but the hard limit is {hard}: raise it "
            f"(`ulimit -Hn {needed}` as root), or ask for fewer --streams"
        )


def measure(streams: int, seconds: float, interval: float) -> dict[str, Any]:
    """Direct, then through the gateway, in one run."""
    cores = sorted(os.sched_getaffinity(0))
    proxy_core, load_core = (cores[0], cores[1]) if len(cores) > 1 else (None, None)
    port = free_port()
    upstream = [sys.executable, "-m", "benchmarks.stamped", "--port", str(port)]
    upstream += ["--events", str(FOR_EVER), "--period-ms", str(interval * 1e3)]
    limits = f"max_concurrent_requests = {2 * streams}\n"
    with (
        running(upstream, load_core, port),
        tempfile.TemporaryDirectory(prefix="bench-streams-") as folder,
        tokenline(port, proxy_core, Path(folder), limits) as proxy,
    ):
        plan = (streams, seconds, interval)
        direct = clients(port, "/v1/chat/completions", "none", plan, load_core)
        worker = proxy.processes()["worker"]
        before = worker.memory_info().rss
        with Watch(worker) as watch:
            ours = clients(proxy.port, proxy.path, proxy.key, plan, load_core)
        observer_mb = round(proxy.processes()["observer"].memory_info().rss / 2**20, 1)
    memory = {
        "worker_rss_mb": round(watch.highest / 2**20, 1),
        "worker_rss_before_mb": round(before / 2**20, 1),
        "kb_per_stream": round((watch.highest - before) / streams / 1024, 1),
        "observer_rss_mb": observer_mb,
    }
    expected = streams * seconds / interval
    ok = (
        memory["worker_rss_mb"] < RSS_LIMIT_MB
        and ours["p99_ms"] <= P99_LIMIT_MS
        and ours["streams"] == streams
        and not ours["lost"]
        and ours["events"] > 0.95 * expected
    )
    shares = {"worker_cpu_share": watch.cpu_share}
    plan_told = {"streams": streams, "interval_seconds": interval, "seconds": seconds, "events_expected": expected}
    return {"direct": direct, "tokenline": ours, **memory, **shares, **plan_told, "cores": len(cores), "ok": ok}


def clients(port: int, path: str, key: str, plan: tuple[int, float, float], core: int | None) -> dict[str, float]:
    """What the clients of one run saw."""
    streams, seconds, interval = plan
    command = [sys.executable, "-m", "benchmarks.open_clients", "--port", str(port), "--path", path]
    command += ["--key", key, "--streams", str(streams), "--seconds", str(seconds), "--interval", str(interval)]
    pin: Callable[[], None] | None = (lambda: os.sched_setaffinity(0, {core})) if core is not None else None
    limit = 120 + seconds + streams / OPENING_PER_SECOND
    done = subprocess.run(command, preexec_fn=pin, capture_output=True, text=True, cwd=ROOT, timeout=limit)
    if done.returncode:
        raise SystemExit(f"the clients failed: {done.stderr.strip()[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout)
    return found


class Watch:
    """The highest memory of a process while the block runs, and its share of a core."""

    def __init__(self, process: psutil.Process) -> None:
        self._process = process
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self.highest = 0
        self.cpu_share = 0.0

    def __enter__(self) -> Watch:
        self._began = (time.monotonic(), sum(self._process.cpu_times()[:2]))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        wall = time.monotonic() - self._began[0]
        self.cpu_share = round((sum(self._process.cpu_times()[:2]) - self._began[1]) / wall, 3)

    def _look(self) -> None:
        while not self._is_over.wait(0.5):
            self.highest = max(self.highest, self._process.memory_info().rss)


def show(result: dict[str, Any]) -> None:
    """For people."""
    console = Console()
    table = Table("", "P50 ms", "P99 ms", "P99.9 ms", "max ms", "events", "streams", "lost")
    for name in ("direct", "tokenline"):
        row = result[name]
        figures = (f"{row[key]:.2f}" for key in ("p50_ms", "p99_ms", "p999_ms", "max_ms"))
        table.add_row(name, *figures, *(str(row[key]) for key in ("events", "streams", "lost")))
    console.print(table)
    console.print(
        f"worker: {result['worker_rss_mb']} MB ({result['kb_per_stream']} KB a stream), "
        f"{result['worker_cpu_share']:.0%} of a core; observer {result['observer_rss_mb']} MB"
    )
    console.print(
        f"limits: worker under {RSS_LIMIT_MB:g} MB, P99 at most {P99_LIMIT_MS:g} ms, no stream lost: "
        f"{'kept' if result['ok'] else 'exceeded'}"
    )


if __name__ == "__main__":
    main()
