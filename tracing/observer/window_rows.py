"""The rows of a window, read through a connection of its own: few numbers of every row, everything of some.

Both are bounded: of more than MAX_ROWS the newest are read, and of those one in so many is read whole.
"""

from __future__ import annotations

import sqlite3
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from protocol.ids import LOAD_TEST_PREFIX
from tracing.observer.rows import Row, decode_row

MAX_ROWS = 100_000
MAX_WHOLE = 4_000
"""Rows of the even sample that are read whole; the slowest come on top."""
LOAD_NS = 10_000_000_000
"""Load: requests that began within this long before, 10 s."""
_CHUNK = 500
_IS_LOAD_TEST = f"coalesce(client_request_id GLOB '{LOAD_TEST_PREFIX}*', 0)"
"""Load tests name their requests (see protocol/ids.py)."""
_MAKES_TOKENS = "surface IN ('chat', 'completions', 'responses', 'messages')"


class Line(NamedTuple):
    """What is read of every row. Times in ms; None: there is none."""

    id: int
    started_ns: int
    ttft_ms: float | None
    tpot_ms: float | None
    e2e_ms: float | None
    outcome: str


class Crowd(NamedTuple):
    """How busy it was when a request began."""

    concurrency: int
    """Requests in flight, this one included."""
    load: int
    """Requests that began in the LOAD_NS before, this one included."""


class WindowRows:
    """Reads one window, once."""

    def __init__(self, path: Path, *, since_ns: int, model: str | None, with_load_tests: bool = True) -> None:
        """Without load tests, only requests that make tokens are read: what users waited for."""
        self._path = path
        self.model = model
        self._with_load_tests = with_load_tests
        self._where = "started_ns >= ?" + ("" if model is None else " AND model = ?")
        self._values: tuple[int | str, ...] = (since_ns,) if model is None else (since_ns, model)
        self.total = 0
        """Rows in the window; more than `lines` when only the newest were read."""
        self.left_out = 0
        """Rows of load tests that were not to be read."""
        self.lines: list[Line] = []
        """Oldest first."""

    def read(self) -> None:
        """Reads `total` and `lines`."""
        with closing(self._connect()) as connection:
            count = f"SELECT count(*) FROM requests WHERE {self._where}"  # noqa: S608  our own words
            (self.total,) = connection.execute(count, self._values).fetchone()
            where = self._where
            if not self._with_load_tests:
                where += f" AND {_MAKES_TOKENS}"
                count = f"SELECT count(*) FROM requests WHERE {where}"  # noqa: S608
                (everything,) = connection.execute(count, self._values).fetchone()
                where += f" AND NOT {_IS_LOAD_TEST}"
                count = f"SELECT count(*) FROM requests WHERE {where}"  # noqa: S608
                (self.total,) = connection.execute(count, self._values).fetchone()
                self.left_out = everything - self.total
            found = connection.execute(
                f"SELECT id, started_ns, ttft_ms, tpot_ms, e2e_ms, outcome FROM requests WHERE {where} "  # noqa: S608
                "ORDER BY started_ns DESC LIMIT ?",
                (*self._values, MAX_ROWS),
            )
            self.lines = [Line(*line) for line in found]
        self.lines.reverse()

    def sample(self) -> list[Line]:
        """Lines evenly spread over the window, at most MAX_WHOLE."""
        step = -(-len(self.lines) // MAX_WHOLE) or 1
        return self.lines[::step]

    def whole(self, lines: Iterable[Line]) -> dict[int, Row]:
        """These rows whole, by id. A row that has left the store meanwhile is missing."""
        ids = [line.id for line in lines]
        found: dict[int, Row] = {}
        with closing(self._connect()) as connection:
            for first in range(0, len(ids), _CHUNK):
                chunk = ids[first : first + _CHUNK]
                marks = ", ".join("?" * len(chunk))
                query = f"SELECT id, body FROM requests WHERE id IN ({marks})"  # noqa: S608  only question marks
                found |= {number: decode_row(body) for number, body in connection.execute(query, chunk)}
        return found

    def crowds(self) -> dict[int, Crowd]:
        """How busy it was at each line's beginning, by id."""
        starts = [line.started_ns for line in self.lines]
        ends = sorted(_end_ns(line) for line in self.lines)
        return {
            line.id: Crowd(
                concurrency=max(1, position + 1 - bisect_right(ends, line.started_ns)),
                load=position + 1 - bisect_right(starts, line.started_ns - LOAD_NS),
            )
            for position, line in enumerate(self.lines)
        }

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(f"{self._path.absolute().as_uri()}?mode=ro", uri=True, timeout=2)


def slowest(lines: Sequence[Line], by: str) -> list[Line]:
    """The lines that have this time (ttft_ms or e2e_ms), slowest first."""
    timed = [line for line in lines if getattr(line, by) is not None]
    return sorted(timed, key=lambda line: -getattr(line, by))


def _end_ns(line: Line) -> int:
    return line.started_ns + round((line.e2e_ms or 0) * 1e6)
