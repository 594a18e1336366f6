"""How accurate the load client is, and how much it can take: `python -m benchmarks.client_accuracy [--json]`.

First against the simulated engine (TTFT of 200 ms and more, TPOT of 50 ms and more), whose own stamps of the same
requests it must match: P50 within 2 %, P99 within 5 %, counts exactly. Then kept to one core, against an upstream on
another that stamps each event: the delay that the client adds at 5,000 events a second and more, less that of a bare
reader of the same events (benchmarks.bare_reader), which is the machine's.

One machine runs both sides, so what else runs there is in the figures: see `load_average`. `--first` gives both sides
precedence over whatever else runs (SCHED_FIFO, for those who may).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.gateway import ROOT, free_port, running

ENGINES = {1: (500, 320), 32: (80, 200), 128: (10, 200)}
"""In flight -> µs of prefill for a token, tokens of a prompt: with a forward of 50 ms, TTFT is 200 ms and more."""
FORWARD_MS, OUTPUT_TOKENS = 50, 16
P50_LIMIT, P99_LIMIT = 0.02, 0.05
RATES = (1_000, 5_000, 10_000, 20_000, 40_000)
"""Events a second, on streams of one event each 50 ms."""
PERIOD_MS = 50
WANTED_RATE, WANTED_MS = 5_000, 1.0
LATE_MS = 10.0
"""A client that adds more than this at the median must say that it was the bottleneck."""


def driver(against: str, port: int, **options: object) -> list[str]:
    """The command line of one run of the client."""
    command = [sys.executable, "-m", "benchmarks.client_driver", against, "--base-url", f"http://127.0.0.1:{port}/v1"]
    for name, value in options.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    return command


def precedence(first: bool) -> list[str]:
    """What a command line begins with that is to run before whatever else there is; its children inherit it."""
    return ["chrt", "--fifo", "10"] if first else []


def run_pinned(command: list[str], core: int | None) -> dict[str, Any]:
    """Runs a command on one core, and gives the JSON that it prints."""
    pin = (lambda: os.sched_setaffinity(0, {core})) if core is not None else None
    done = subprocess.run(command, preexec_fn=pin, capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def against_engine(in_flight: int, seconds: float, *, first: bool = False) -> dict[str, Any]:
    """The client beside the engine's own stamps."""
    prefill_us, prompt_tokens = ENGINES[in_flight]
    port = free_port()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-engine-"))
        environ = {k: v for k, v in os.environ.items() if not k.startswith("TOKENLINE_")} | {
            "TOKENLINE_STATE_DIR": folder,
            "TOKENLINE_SERVER__PORT": str(port),
            "TOKENLINE_SIMULATED__FORWARD_MS": str(FORWARD_MS),
            "TOKENLINE_SIMULATED__PREFILL_TOKEN_US": str(prefill_us),
        }
        command = [str(Path(sys.executable).with_name("tokenline")), "engine", "--device", "simulated"]
        stack.enter_context(running([*precedence(first), *command], None, port, env=environ))
        sizes = {"prompt_tokens": prompt_tokens, "output_tokens": OUTPUT_TOKENS}
        load = {"in_flight": in_flight, "seconds": seconds}
        found = run_pinned([*precedence(first), *driver("engine", port, model="simulated", **load, **sizes)], None)
    off = {label: max(abs(found[name][label]["off"]) for name in ("ttft_ms", "tpot_ms")) for label in ("p50", "p99")}
    found["holds"] = found["counts_exact"] and off["p50"] <= P50_LIMIT and off["p99"] <= P99_LIMIT
    return found


def on_one_core(rate: int, seconds: float, *, together: bool = False, first: bool = False) -> dict[str, Any]:
    """The client on a core of its own, the upstream on another; then a bare reader in the client's place."""
    cores = sorted(os.sched_getaffinity(0))
    client_core, upstream_core = (cores[-1], cores[0]) if len(cores) > 1 else (None, None)
    streams, port = rate * PERIOD_MS // 1000, free_port()
    command = [sys.executable, "-m", "benchmarks.stamped", "--port", str(port), "--events", "64"]
    command += ["--period-ms", str(PERIOD_MS), *(["--together"] if together else [])]
    before = precedence(first)
    with running([*before, *command], upstream_core, port):
        options = {"in_flight": streams, "seconds": seconds}
        found = run_pinned([*before, *driver("stamped", port, model="m", **options)], client_core)
        bare = [sys.executable, "-m", "benchmarks.bare_reader", "--port", str(port), "--in-flight", str(streams)]
        floor = run_pinned([*before, *bare, "--seconds", str(seconds / 2)], client_core)
    own = found["added_ms"]["p50"] - floor["added_ms"]["p50"]
    return {
        "asked_per_second": rate,
        "together": together,
        **found,
        "bare_reader_added_ms": floor["added_ms"],
        "own_added_p50_ms": round(own, 4),
    }


def measure(*, quick: bool, first: bool) -> dict[str, Any]:
    """Everything, with a bar."""
    rates = RATES[1:2] if quick else RATES
    cells: list[tuple[str, int]] = [("engine", n) for n in ENGINES] + [("core", rate) for rate in rates]
    accuracy, capacity = [], []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for kind, number in progress.track(cells, description="measuring"):
            if kind == "engine":
                accuracy.append(
                    against_engine(number, (9 if quick else 24) if number > 1 else (12 if quick else 30), first=first)
                )
            else:
                capacity.append(on_one_core(number, 6 if quick else 12, first=first))
        if not quick:
            capacity.append(on_one_core(WANTED_RATE, 12, together=True, first=first))
    wanted = next(one for one in capacity if one["asked_per_second"] == WANTED_RATE)
    return {
        "accuracy": accuracy,
        "one_core": capacity,
        "holds": {
            "accuracy": all(one["holds"] for one in accuracy),
            "events": wanted["events_per_second"] >= 0.95 * WANTED_RATE and wanted["own_added_p50_ms"] < WANTED_MS,
            "says_when_it_cannot": all(
                one["says_it_was_the_bottleneck"] for one in capacity if one["own_added_p50_ms"] >= LATE_MS
            ),
        },
        "load_average": [round(value, 1) for value in os.getloadavg()],
        "cores": len(os.sched_getaffinity(0)),
    }


def show(result: dict[str, Any]) -> None:
    """The two tables."""
    out = Console()
    table = Table(title="client / engine, ms", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in ("in flight", "requests", "TTFT P50", "TTFT P99", "TPOT P50", "TPOT P99", "counts", "holds"):
        table.add_column(name, justify="right")
    for one in result["accuracy"]:
        cells = [
            f"{at['client']:.1f} / {at['engine']:.1f} ({at['off']:+.1%})"
            for name in ("ttft_ms", "tpot_ms")
            for at in (one[name]["p50"], one[name]["p99"])
        ]
        exact, holds = ("exact" if one["counts_exact"] else "WRONG"), ("yes" if one["holds"] else "NO")
        table.add_row(str(one["in_flight"]), str(one["requests"]), *cells, exact, holds)
    out.print(table)
    table = Table(title="the client on one core", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in ("streams", "events/s", "added P50", "P99", "bare P50", "own P50 ms", "CPU", "bottleneck?"):
        table.add_column(name, justify="right")
    for one in result["one_core"]:
        added = (one["added_ms"]["p50"], one["added_ms"]["p99"], one["bare_reader_added_ms"]["p50"])
        delays = (f"{value:.2f}" for value in (*added, one["own_added_p50_ms"]))
        streams = f"{one['in_flight']}{', all at once' if one['together'] else ''}"
        says = "yes" if one["says_it_was_the_bottleneck"] else "no"
        table.add_row(streams, f"{one['events_per_second']:,}", *delays, f"{one['client_cpu_share'] or 0:.0%}", says)
    out.print(table)
    out.print(f"holds: {result['holds']}; load average {result['load_average']}, {result['cores']} cores")


def main() -> None:
    """Measures and prints; exit status 1 where a claim does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON on standard output")
    parser.add_argument("--quick", action="store_true", help="shorter, and one rate only: about a minute")
    parser.add_argument("--first", action="store_true", help="take precedence over whatever else runs (SCHED_FIFO)")
    args = parser.parse_args()
    result = measure(quick=args.quick, first=args.first)
    print(json.dumps(result, indent=1)) if args.json else show(result)
    sys.exit(not all(result["holds"].values()))


if __name__ == "__main__":
    main()
