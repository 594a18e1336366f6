"""The gateway's own part of a request: what is left when upload, queue and attempts are taken away."""

from __future__ import annotations

import pytest
from ledgers import HERE, attempt, ledger

from tracing.stages import timeline_of, union_ns


def ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 6)


def test_overhead_is_e2e_less_attempts_less_upload_less_queue() -> None:
    timeline = timeline_of(ledger(), HERE)
    assert ms(timeline.overhead) == pytest.approx(186.0 - (185.0 - 6.0) - 2.0 - 1.5)


def test_overhead_takes_the_union_of_attempts_that_overlap() -> None:
    hedged = [attempt(1, connect_start=6.0, end=100.0), attempt(2, connect_start=50.0, end=185.0)]
    assert ms(timeline_of(ledger(attempts=hedged), HERE).overhead) == pytest.approx(3.5)


def test_overhead_never_equals_the_total_when_the_upstream_took_the_time() -> None:
    timeline = timeline_of(ledger(timings=None), HERE)
    assert timeline.overhead is not None
    assert timeline.e2e is not None
    assert timeline.overhead < timeline.e2e / 10


@pytest.mark.parametrize(
    ("intervals", "length"),
    [
        ([], 0),
        ([(1, 3)], 2),
        ([(1, 3), (3, 5)], 4),
        ([(1, 5), (2, 3)], 4),
        ([(4, 6), (1, 5)], 5),
        ([(1, 2), (8, 9)], 2),
    ],
)
def test_union_counts_time_once(intervals: list[tuple[int, int]], length: int) -> None:
    assert union_ns(intervals) == length
