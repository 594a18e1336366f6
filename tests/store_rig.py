"""A store whose drops are written down, and rows and spans to put into it."""

from __future__ import annotations

import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

from ledgers import HERE, WALL_NS

from tracing.clock import FakeClock
from tracing.ledger import Ledger
from tracing.observer.rows import Row
from tracing.observer.store import Store
from tracing.spans import Span
from tracing.stages import timeline_of


def row(made: Ledger, *, kept: bool = True) -> Row:
    return Row(made, timeline_of(made, HERE), HERE, kept)


def span(number: int, trace_id: str = "a" * 32) -> Span:
    return Span(trace_id, f"{number:016x}", f"span {number}", number, number + 1)


class Rig:
    """A store whose drops and late spans are written down."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.dropped: Counter[str] = Counter()
        self.late: list[tuple[list[str], bool]] = []
        self.clock = FakeClock(wall=WALL_NS)
        limits = {"max_rows": 1000, "max_traces": 1000, "max_age_seconds": 3600.0, "clock": self.clock} | options
        self.store = Store(path, dropped=self._drop, late_stored=self._late, **limits)
        self.store.open()

    def _drop(self, reason: str, count: int) -> None:
        self.dropped[reason] += count

    def _late(self, spans: list[Span], stand_ins_left: bool) -> None:
        self.late.append(([one.name for one in spans], stand_ins_left))


def count(path: Path, table: str) -> int:
    with sqlite3.connect(path) as connection:
        (found,) = connection.execute(f"SELECT count(*) FROM {table}").fetchone()  # noqa: S608
        return int(found)
