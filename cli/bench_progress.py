"""The bar of a running load test, with what it measures at the moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter_ns

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from loadtest.driver import Driver
from loadtest.driver import Progress as Done
from loadtest.figures import quantile
from loadtest.stages import Stage

RECENT = 200
"""Requests that the live median is taken of."""


@contextmanager
def live(stages: tuple[Stage, ...]) -> Iterator[Callable[[Driver, Done], None]]:
    """A function that is told how far the run is."""
    total = sum(stage.seconds for stage in stages)
    console = Console(stderr=True, markup=False, highlight=False)
    columns = (BarColumn(20), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("asking the endpoint", total=total)
        seen = (0, 0)

        def tell(driver: Driver, done: Done) -> None:
            nonlocal seen
            now_ns = perf_counter_ns()
            before_ns, before = seen
            seen = (now_ns, done.token_events)
            rate = (done.token_events - before) * 1e9 / (now_ns - before_ns) if before_ns else 0.0
            passed = max(0.0, (now_ns - done.started_ns) / 1e9)
            bar.update(task, completed=min(passed, total), description=_words(driver, done, stages, passed, rate))

        yield tell


def _words(driver: Driver, done: Done, stages: tuple[Stage, ...], passed: float, rate: float) -> str:
    recent = sorted(t for record in driver.records[-RECENT:] if (t := record.ttft_from_sent_ms) is not None)
    ttft = f"{quantile(recent, 0.5):.0f} ms" if recent else "-"
    failed = f", {done.failed.total()} failed" if done.failed else ""
    return (
        f"{_stage(stages, passed)}: {done.in_flight} in flight, {rate:.0f} token events/s, "
        f"TTFT P50 {ttft}, {done.good} done{failed}"
    )


def _stage(stages: tuple[Stage, ...], passed: float) -> str:
    end = 0.0
    for number, stage in enumerate(stages, 1):
        end += stage.seconds
        if passed < end:
            return f"stage {number}/{len(stages)}"
    return "the last to end"
