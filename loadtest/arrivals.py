"""When requests of an open loop are due: instants on an absolute schedule, whatever became of those before."""

from __future__ import annotations

import random
from collections.abc import Iterator

from loadtest.settings import Arrival


def arrivals(
    start_ns: int, end_ns: int, rate: float, arrival: Arrival, burstiness: float, rng: random.Random
) -> Iterator[int]:
    """Instants from `start_ns` to before `end_ns`, `rate` per second on average.

    Gaps are all equal (constant), exponential (poisson), or gamma-distributed with shape `burstiness`, mean 1/rate.
    """
    mean_ns = 1e9 / rate
    number = 0
    at_ns = float(start_ns)
    while True:
        if arrival == "constant":
            # Multiplied, not added up: rounding never moves the schedule.
            at_ns = start_ns + number * mean_ns
            number += 1
        elif arrival == "poisson":
            at_ns += rng.expovariate(1.0) * mean_ns
        else:
            at_ns += rng.gammavariate(burstiness, 1.0 / burstiness) * mean_ns
        if at_ns >= end_ns:
            return
        yield round(at_ns)
