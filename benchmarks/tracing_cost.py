"""What tracing costs the relay: throughput and TTFT with everything on, against the same relay with tracing off.

Off is a relay worker whose clock stands still, which reports nothing, looks at no socket and measures no lag of its
loop; what it needs to be a gateway stays (keys, admission, usage events). On is the worker as it ships, with an
observer that takes, joins, stores and counts everything. Throughput: short runs of one and the other in turn, whichever
is not measured being stopped (SIGSTOP). TTFT: single requests to one and the other in turn. So what else the machine
does weighs on both alike.

The worker has a core of its own and must be what is slowest, on both sides: one that has to wait pays for it (a wake-up
and cold caches for every few events), whatever is traced. So load and upstream come first on the other core, and the
observer has what they leave of it (SCHED_IDLE), then time to take the rest; with three cores or more it has one too.
`worker_busy` says whether it held. The observer's own cost is given beside.

    python -m benchmarks.tracing_cost --json       about three minutes
    python -m benchmarks.tracing_cost --quick      under a minute
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.gateway import free_port, running
from settings.feed import Feed
from settings.schema import Settings

KEY = "bench-key"
PATH = "/api/v1/chat/completions"
CONNECTIONS = 16
THROUGHPUT_TARGET = 0.90
ADDED_TTFT_TARGET_US = 50.0
BUSY_TARGET = 0.97
DRAIN_POLL_SECONDS = 0.1
MAX_DRAIN_POLLS = 100


def serve(tracing: str, settings: Settings) -> None:
    """A relay worker, as it ships or with tracing off."""
    from gateway import worker

    if tracing == "off":
        _switch_off(worker)
    worker.run_worker(Feed(settings))


def _switch_off(worker: Any) -> None:
    from gateway.connection import Connection
    from gateway.exchange import Exchange
    from gateway.lag import LoopLag
    from gateway.reporter import Reporter

    class StoppedClock:
        mono_ns = staticmethod(lambda: 1)
        wall_ns = staticmethod(lambda: 1)

    def nothing(*_: Any) -> None:
        return None

    worker.SystemClock = StoppedClock
    for owner, names in (
        (Reporter, ("admitted", "first_token", "closed")),
        (LoopLag, ("start",)),
        (Exchange, ("woke",)),
        (Connection, ("end",)),
    ):
        for name in names:
            if not hasattr(owner, name):
                raise SystemExit(f"{owner.__name__}.{name} is gone: what switches tracing off must be written anew")
            setattr(owner, name, nothing)


class Side:
    """One of the two: its worker, and its observer where it has one."""

    def __init__(self, port: int, worker: psutil.Process, observer: psutil.Process | None) -> None:
        self.port = port
        self.worker = worker
        self.observer = observer

    def freeze(self, frozen: bool) -> None:
        """Stops or continues it."""
        for process in (self.worker, *([self.observer] if self.observer else [])):
            process.send_signal(signal.SIGSTOP if frozen else signal.SIGCONT)

    def measure(self, seconds: float, core: int | None) -> dict[str, Any]:
        """One run of streams, alone: figures of the load, and CPU seconds of each process per request."""
        pin = (lambda: os.sched_setaffinity(0, {core})) if core is not None else None
        command = [sys.executable, "-m", "benchmarks.wire", "load", "--stream", "--port", str(self.port)]
        command += ["--path", PATH, "--key", KEY]
        command += ["--connections", str(CONNECTIONS), "--seconds", str(seconds)]
        self.freeze(False)
        try:
            before = self._cpu()
            done = subprocess.run(command, preexec_fn=pin, capture_output=True, text=True, check=True)
            loaded = self._cpu()
            after = self._rested()
        finally:
            self.freeze(True)
        found: dict[str, Any] = json.loads(done.stdout)
        requests = found["requests"]
        found["worker_cpu_us"] = (after[0] - before[0]) / requests * 1e6
        found["worker_busy"] = (loaded[0] - before[0]) / seconds
        found["observer_cpu_us"] = (after[1] - before[1]) / requests * 1e6
        return found

    def _rested(self) -> tuple[float, float]:
        """CPU seconds once all records have been taken: the observer spends next to nothing any more."""
        last = self._cpu()
        for _ in range(MAX_DRAIN_POLLS):
            time.sleep(DRAIN_POLL_SECONDS)
            now = self._cpu()
            if now[1] - last[1] < DRAIN_POLL_SECONDS / 5:
                break
            last = now
        return now

    def _cpu(self) -> tuple[float, float]:
        def spent(process: psutil.Process | None) -> float:
            return sum(process.cpu_times()[:2]) if process else 0.0

        return spent(self.worker), spent(self.observer)


@contextmanager
def sides(stack: ExitStack, cores: list[int]) -> Iterator[dict[str, Side]]:
    """Both sides, stopped, in front of one mock upstream."""
    pinned = len(cores) > 1
    worker_core, load_core = (cores[0], cores[1]) if pinned else (None, None)
    observer_core = cores[2] if len(cores) > 2 else load_core
    upstream = free_port()
    command = [sys.executable, "-m", "benchmarks.wire", "upstream", "--port", str(upstream)]
    stack.enter_context(running(command, load_core, upstream))
    found = {}
    for name in ("off", "on"):
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"bench-tracing-{name}-")))
        port, ops, otlp = free_port(), free_port(), free_port()
        settings = Settings.model_validate(
            {
                "state_dir": folder,
                "server": {"port": port, "ops_port": ops, "otlp_port": otlp},
                "engine": {"backend": "none"},
                "upstreams": [{"name": "mock", "url": f"http://127.0.0.1:{upstream}/v1"}],
                "models": [{"name": "m", "targets": [{"upstream": "mock"}]}],
            }
        )
        settings.run_dir.mkdir()
        observer = None
        packed = settings.model_dump_json()
        if name == "on":
            command = [sys.executable, "-m", "benchmarks.observer_throughput", "observe", packed]
            observer = stack.enter_context(running(command, observer_core, ops)).pid
            if observer_core == load_core and hasattr(os, "SCHED_IDLE"):
                leave_the_core(observer)
        command = [sys.executable, "-m", "benchmarks.tracing_cost", "serve", name, packed]
        environ = {**os.environ, "TOKENLINE_BENCH_KEY": KEY}
        worker = stack.enter_context(running(command, worker_core, port, env=environ)).pid
        found[name] = Side(port, psutil.Process(worker), psutil.Process(observer) if observer else None)
    time.sleep(1)
    for side in found.values():
        side.freeze(True)
    try:
        yield found
    finally:
        for side in found.values():
            side.freeze(False)


def leave_the_core(pid: int) -> None:
    """All threads of the process run when nobody else wants their core."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setscheduler(int(thread.name), os.SCHED_IDLE, os.sched_param(0))


def measure(pairs: int, seconds: float, ttft_seconds: float) -> dict[str, Any]:
    """Runs in pairs, and what they come to: medians of the pairs' ratios; the difference of the medians of TTFT."""
    cores = sorted(os.sched_getaffinity(0))
    load_core = cores[1] if len(cores) > 1 else None
    runs: list[dict[str, Any]] = []
    with ExitStack() as stack:
        both = stack.enter_context(sides(stack, cores))
        progress = stack.enter_context(Progress(console=Console(stderr=True), transient=True))
        task = progress.add_task("warming", total=pairs + 1)
        for side in both.values():
            side.measure(0.5, load_core)
        for number in range(pairs):
            progress.update(task, description="throughput", completed=number)
            order = ("off", "on") if number % 2 == 0 else ("on", "off")
            runs.append({name: both[name].measure(seconds, load_core) for name in order})
        progress.update(task, description="TTFT", completed=pairs)
        ttft = first_events(both, ttft_seconds, load_core)
    off_us, on_us = ttft["first_event_p50_us"]
    quick_off_us, quick_on_us = ttft["first_event_p10_us"]
    capacity = statistics.median(run["off"]["worker_cpu_us"] / run["on"]["worker_cpu_us"] for run in runs)
    with_observer = statistics.median(
        run["off"]["worker_cpu_us"] / (run["on"]["worker_cpu_us"] + run["on"]["observer_cpu_us"]) for run in runs
    )
    busy = {name: statistics.median(run[name]["worker_busy"] for run in runs) for name in ("off", "on")}
    return {
        "worker_throughput_ratio": capacity,
        "worker_busy": busy,
        "throughput_ratio_per_cpu_second_with_observer": with_observer,
        "added_ttft_us": on_us - off_us,
        "added_ttft_p10_us": quick_on_us - quick_off_us,
        "ttft_us": {"off": off_us, "on": on_us},
        "observer_cpu_us_per_request": statistics.median(run["on"]["observer_cpu_us"] for run in runs),
        "targets": {
            "worker_throughput_ratio": THROUGHPUT_TARGET,
            "worker_busy": BUSY_TARGET,
            "added_ttft_us": ADDED_TTFT_TARGET_US,
        },
        "met": capacity >= THROUGHPUT_TARGET
        and min(busy.values()) >= BUSY_TARGET
        and on_us - off_us <= ADDED_TTFT_TARGET_US,
        "runs": runs,
        "cores": len(cores),
    }


def first_events(both: dict[str, Side], seconds: float, core: int | None) -> dict[str, list[float]]:
    """Times to the first event with tracing off and on, asked in turn."""
    pin = (lambda: os.sched_setaffinity(0, {core})) if core is not None else None
    ports = f"{both['off'].port},{both['on'].port}"
    command = [sys.executable, "-m", "benchmarks.turns", "--ports", ports, "--path", PATH, "--key", KEY]
    for side in both.values():
        side.freeze(False)
    done = subprocess.run(
        [*command, "--seconds", str(seconds)], preexec_fn=pin, capture_output=True, text=True, check=True
    )
    found: dict[str, list[float]] = json.loads(done.stdout)
    return found


def main() -> None:
    """Measures and prints."""
    if sys.argv[1:2] == ["serve"]:
        settings = Settings.model_validate_json(sys.argv[3])
        server = settings.server.model_copy(update={"api_key": os.environ["TOKENLINE_BENCH_KEY"]})
        serve(sys.argv[2], Settings.model_validate({**settings.model_dump(), "server": server.model_dump()}))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON on standard output")
    parser.add_argument("--quick", action="store_true", help="fewer, shorter runs: under a minute")
    args = parser.parse_args()
    result = measure(6, 1.5, 12) if args.quick else measure(20, 2.5, 40)
    print(json.dumps(result, indent=1)) if args.json else show(result)


def show(result: dict[str, Any]) -> None:
    """The result for people."""
    table = Table("figure", "seen", "target")
    at_least, at_most = f"at least {THROUGHPUT_TARGET:.0%}", f"at most {ADDED_TTFT_TARGET_US:g} µs"
    table.add_row(
        "relay throughput with tracing (worker's CPU time)", f"{result['worker_throughput_ratio']:.1%}", at_least
    )
    busy, nearly_all = min(result["worker_busy"].values()), f"at least {BUSY_TARGET:.0%}"
    table.add_row("worker's core busy meanwhile, on the side where it was less", f"{busy:.1%}", nearly_all)
    with_observer = result["throughput_ratio_per_cpu_second_with_observer"]
    table.add_row("the same with the observer's CPU time counted as well", f"{with_observer:.1%}", "-")
    table.add_row("added TTFT, median", f"{result['added_ttft_us']:.0f} µs", at_most)
    table.add_row(
        "the same at P10 (other work on the machine weighs least)", f"{result['added_ttft_p10_us']:.0f} µs", "-"
    )
    table.add_row("observer, CPU time per request", f"{result['observer_cpu_us_per_request']:.0f} µs", "-")
    Console().print(table)


if __name__ == "__main__":
    main()
