"""The load client against something that stamps what it writes, in a process of its own that may be kept to one core.

`python -m benchmarks.client_driver engine|stamped --base-url U ...` prints one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import time
from itertools import pairwise
from typing import Any

import uvloop

from loadtest.client import LoadClient
from loadtest.driver import Driver, Progress
from loadtest.figures import quantile, rounded
from loadtest.limits import raise_open_files
from loadtest.monitor import Monitor
from loadtest.record import Record
from loadtest.session import Asked, open_bench
from loadtest.settings import LoadTest, Metrics, bench_settings
from loadtest.stages import Stage
from loadtest.tally import tally
from tracing.clock import SystemClock


async def drive(args: argparse.Namespace) -> dict[str, Any]:
    """One stage of load and what came of it."""
    given = {
        "api": {"base_url": args.base_url, "api_key_env": None, "model": args.model, "timeout_seconds": 120},
        "workload": {
            "prompt_tokens": args.prompt_tokens,
            "max_output_tokens": args.output_tokens,
            "ignore_eos": True,
        },
        "metrics": {"collect_gpu_util": False},
    }
    settings, clock, rng, progress = bench_settings(given, "benchmark"), SystemClock(), random.Random(), Progress()
    raise_open_files(args.in_flight)
    stage = Stage(args.in_flight, args.seconds, args.seconds * 2 / 3)
    async with open_bench(Asked(settings), rng) as session:
        client = LoadClient(session.endpoint, session.model, settings, clock, rng)
        driver = Driver(client, (stage,), session.prompts, LoadTest(), clock, progress, 120)
        monitor = Monitor(progress, clock, 500, None)
        watching = asyncio.create_task(monitor.run())
        await driver.run()
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    (window,) = driver.windows
    counted = [record for record in driver.records if window.counts(record.scheduled_ns)]
    figures = tally(stage, window, driver.records, monitor, {}, is_stream=True, collect=Metrics())
    own = figures["client"]
    told = {
        "in_flight": args.in_flight,
        "requests": len(counted),
        "failed": figures["errors"],
        "events_per_second": round(
            sum(window.counts(at) for r in driver.records for at in r.token_events) / window.counted_seconds
        ),
        "client_cpu_share": own["cpu_share"],
        "loop_lag_ms": own["loop_lag_ms"],
        "says_it_was_the_bottleneck": own["was_bottleneck"],
    }
    good = [record for record in counted if record.is_good]
    return told | (by_engine(good, args) if args.against == "engine" else by_stamps(good))


def by_stamps(records: list[Record]) -> dict[str, Any]:
    """From the instant at which an event was about to be written to that at which the client had it, in ms."""
    delays = sorted(
        (read - int(said)) / 1e6
        for record in records
        for read, said in zip(record.token_events, record.text or (), strict=True)
    )
    return {"added_ms": {name: rounded(quantile(delays, share)) for name, share in _SHARES}, "events": len(delays)}


_SHARES = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))


def by_engine(records: list[Record], args: argparse.Namespace) -> dict[str, Any]:
    """TTFT from sending and TPOT, by the client's reading and by the engine's own stamps of the same requests."""
    marks = [record.timings.marks for record in records if record.timings and record.timings.marks]
    assert len(marks) == len(records), "an answer came without the engine's marks"
    steps = args.output_tokens - 1
    pairs = {
        "ttft_ms": [
            ((r.first_token_ns - r.sent_ns) / 1e6, ((m.first_written or 0) - r.sent_ns) / 1e6)
            for r, m in zip(records, marks, strict=True)
        ],
        "tpot_ms": [
            (r.tpot_ms or 0.0, ((m.last_token or 0) - (m.prefill_end or 0)) / 1e6 / steps)
            for r, m in zip(records, marks, strict=True)
        ],
    }
    found: dict[str, Any] = {
        "counts_exact": all(
            record.output_tokens == len(record.token_events) == args.output_tokens
            and record.prompt_tokens == args.prompt_tokens
            for record in records
        ),
        "in_order": all(a <= b for record in records for a, b in pairwise(record.token_events)),
    }
    for name, both in pairs.items():
        client, engine = sorted(one for one, _ in both), sorted(other for _, other in both)
        found[name] = {
            label: {
                "client": rounded(quantile(client, share)),
                "engine": rounded(quantile(engine, share)),
                "off": rounded(quantile(client, share) / quantile(engine, share) - 1),
            }
            for label, share in (("p50", 0.5), ("p99", 0.99))
        }
    return found


def main() -> None:
    """Drives and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("against", choices=["engine", "stamped"])
    parser.add_argument("--base-url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--in-flight", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=64)
    began = time.perf_counter()
    gc.freeze()
    found = uvloop.run(drive(parser.parse_args()))
    print(json.dumps({**found, "seconds": round(time.perf_counter() - began, 1)}))


if __name__ == "__main__":
    main()
