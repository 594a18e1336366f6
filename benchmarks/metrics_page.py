"""How long the /metrics page takes when every label has all the values that it may have, and how large it is then.

`python -m benchmarks.metrics_page [--models 64] [--upstreams 1]`: every model at every upstream. The limit is 5 MB and
200 ms. What prometheus_client's own encoder takes for the same page stands beside it.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client import exposition as text_format
from prometheus_client.openmetrics import exposition as openmetrics

from benchmarks.observer_throughput import ledger
from settings.schema import SloSettings
from tracing.clock import SystemClock, host_identity
from tracing.ledger import Attempt, Outcome, Usage, WorkerState
from tracing.observer.bands import Bands
from tracing.observer.exposition import write
from tracing.observer.meters import MAX_ROUTES, Meters
from tracing.observer.rows import Row
from tracing.observer.slo import Objectives, SloCounter
from tracing.observer.waiting import Waiting
from tracing.observer.workers import Workers
from tracing.stages import timeline_of

REQUESTS_PER_ROUTE = 60


def full_registry(models: int, upstreams: int) -> CollectorRegistry:
    """As many models and upstreams, every model at every upstream, with requests of every size and several outcomes."""
    registry, clock, host, chance = CollectorRegistry(), SystemClock(), host_identity(), random.Random(1)
    meters = Meters(registry, trace_is_kept=lambda *_: True)
    bands = Bands(clock, meters.band_request, meters.band_seconds)
    slo = SloCounter(Objectives({"default": SloSettings(ttft_ms=60)}), clock, meters.slo)
    workers = Workers(
        clock,
        meters.gauges,
        max_names=MAX_ROUTES,
        dropped=meters.ledgers_dropped,
        lagged=meters.loop_lags,
        waiting=Waiting(),
    )
    for route in range(models * upstreams):
        # One upstream: each model has one of its own.
        place = route % upstreams if upstreams > 1 else route
        model, upstream = f"organisation/model-number-{route // upstreams}", f"upstream-{place}"
        for number in range(REQUESTS_PER_ROUTE):
            made = ledger(route * REQUESTS_PER_ROUTE + number)
            late = round(chance.lognormvariate(0, 1.5) * 1e8)
            first, last = made.attempts[0], made.attempts[0]
            if number % 10 == 0:
                last = msgspec.structs.replace(last, number=2, connect_start=first.connect_start + 1)
            made = msgspec.structs.replace(
                made,
                model=model,
                upstream=upstream,
                team=f"team-{route}",
                first_token_written=made.first_token_written + late,
                last_token=made.last_token + late,
                finish=made.finish + late,
                backpressure_ns=late // 10,
                client_rtt_ns=late // 100,
                outcome=Outcome.UPSTREAM_ERROR if number % 20 == 0 else Outcome.OK,
                stream=number % 7 != 0,
                usage=Usage((100, 1000, 4000, 9000)[number % 4], 51, 5, 5, "usage"),
                attempts=_attempts(upstream, first, last),
            )
            timeline = timeline_of(made, host)
            row = Row(made, timeline, host, True)
            meters.closed(row)
            meters.stages(row)
            bands.told(row)
            slo.closed(made, timeline)
            slo.told(made, timeline)
        lags = [1000, 10**6]
        workers.report(
            WorkerState(route, route, host, {upstream: 3}, 0, queue_depth=1, waiting={model: 1}, loop_lags=lags)
        )
    return registry


def _attempts(upstream: str, first: Attempt, last: Attempt) -> list[Attempt]:
    attempts = [first] if first is last else [first, last]
    return [msgspec.structs.replace(attempt, upstream=upstream) for attempt in attempts]


def milliseconds(encode: Callable[[], bytes], times: int = 5) -> float:
    """The best of some."""
    took = []
    for _ in range(times):
        began = time.perf_counter()
        encode()
        took.append(time.perf_counter() - began)
    return round(min(took) * 1e3, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=64)
    parser.add_argument("--upstreams", type=int, default=1)
    asked = parser.parse_args()
    registry = full_registry(asked.models, asked.upstreams)
    page = write(registry, openmetrics=True)
    figures = {
        "megabytes": round(len(page) / 1e6, 2),
        "lines": page.count(b"\n"),
        "openmetrics_ms": milliseconds(lambda: write(registry, openmetrics=True)),
        "text_ms": milliseconds(lambda: write(registry, openmetrics=False)),
        "library_openmetrics_ms": milliseconds(lambda: openmetrics.generate_latest(registry)),
        "library_text_ms": milliseconds(lambda: text_format.generate_latest(registry)),
        "same_bytes": page == openmetrics.generate_latest(registry),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
