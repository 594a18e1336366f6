"""The store: a row for every request in a capped ring, and the engine spans of kept traces, in SQLite.

One thread of its own writes, in transactions of at most BATCH_SECONDS. The queue to it is bounded: when it is full, or
the disk is, work is dropped and counted, and requests go on. Readers see what is queued before what is on disk, so a
request can be found as soon as it has ended.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from tracing.observer.rows import COLUMNS, Row, columns_of, decode_row
from tracing.observer.schema import connect, open_database
from tracing.spans import Span

BATCH_SECONDS = 0.2
MAX_QUEUE = 20_000
MAX_BATCH = 2_000

_INSERT = f"INSERT INTO requests ({', '.join(COLUMNS)}) VALUES ({', '.join('?' * len(COLUMNS))})"  # noqa: S608
_UPDATE = f"UPDATE requests SET {', '.join(f'{name} = ?' for name in COLUMNS)} WHERE request_id = ?"  # noqa: S608
_KEEP_TRACE = (
    "INSERT INTO traces (trace_id, stand_ins_left) VALUES (?, ?) ON CONFLICT (trace_id) "
    "DO UPDATE SET stand_ins_left = max(stand_ins_left, excluded.stand_ins_left)"
)
_ANY_ID = "request_id = ?1 OR client_request_id = ?1 OR trace_id = ?1"

_encode_spans = msgspec.msgpack.Encoder().encode
_decode_spans = msgspec.msgpack.Decoder(list[Span]).decode

log = logging.getLogger("tokenline.observer.store")


class AddRow(msgspec.Struct, frozen=True):
    """A request that ended."""

    row: Row


class ReplaceRow(msgspec.Struct, frozen=True):
    """More became known of a request that is stored already."""

    row: Row


class AddSpans(msgspec.Struct, frozen=True):
    """Engine spans of a kept trace; the list may be empty, and then the trace is only known to be kept."""

    trace_id: str
    spans: list[Span]
    stand_ins_left: bool = False
    """Spans derived in place of the engine's were exported."""


class AddLateSpans(msgspec.Struct, frozen=True):
    """Engine spans whose trace is in nobody's memory: stored if the trace is, else dropped and counted."""

    trace_id: str
    spans: list[Span]


Job = AddRow | ReplaceRow | AddSpans | AddLateSpans
Dropped = Callable[[str, int], None]
"""(reason, how many rows or traces)."""
LateStored = Callable[[list[Span], bool], None]
"""(spans, whether stand-ins for them were exported before); called on the store's thread."""


class Store:
    """Writes through its own thread, reads through any. `open` before use, `close` to flush."""

    def __init__(
        self,
        path: Path,
        *,
        max_rows: int,
        max_traces: int,
        dropped: Dropped,
        late_stored: LateStored = lambda spans, stand_ins_left: None,
        max_queue: int = MAX_QUEUE,
    ) -> None:
        self._path = path
        self._max_rows = max_rows
        self._max_traces = max_traces
        self._dropped = dropped
        self._late_stored = late_stored
        self._max_queue = max_queue
        # Guards the two below. Jobs stay in `_writing` until their transaction ended, so that readers miss nothing.
        self._changed = threading.Condition()
        self._queue: deque[Job] = deque()
        self._writing: list[Job] = []
        self._closing = False
        self._hurried = False
        self._thread = threading.Thread(target=self._run, name="tokenline-store", daemon=True)
        self._reading = threading.Lock()
        self._writer: sqlite3.Connection
        self._reader: sqlite3.Connection
        self.is_open = False

    def open(self) -> None:
        """Opens or makes the file and starts the writer. Raises StoreError."""
        self._writer = open_database(self._path)
        self._reader = connect(self._path)
        self._thread.start()
        self.is_open = True

    def close(self) -> None:
        """Writes what is queued and closes the file."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        self.is_open = False
        with self._reading:
            self._reader.close()
        self._writer.close()

    def put(self, job: Job) -> bool:
        """Queues one job; False when it had to be dropped. Never waits."""
        with self._changed:
            if len(self._queue) < self._max_queue and not self._closing:
                self._queue.append(job)
                if len(self._queue) == MAX_BATCH:
                    self._changed.notify_all()
                return True
        self._dropped("store_queue_full", 1)
        return False

    def flush(self, timeout_seconds: float = 10) -> bool:
        """Waits until everything queued so far has been written or dropped."""
        with self._changed:
            self._hurried = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._queue and not self._writing, timeout_seconds)

    # Reading

    def find(self, any_id: str) -> list[Row]:
        """Every request with this request id, client's id or trace id, oldest first."""
        found = {row.ledger.request_id: row for row in self._queued_rows() if any_id in _ids(row)}
        bodies = self._select(f"SELECT body FROM requests WHERE {_ANY_ID} ORDER BY id DESC LIMIT 100", any_id)  # noqa: S608
        for row in map(decode_row, bodies):
            found.setdefault(row.ledger.request_id, row)
        return sorted(found.values(), key=lambda row: row.ledger.wall_ns)

    def slow(self, *, since_ns: int, model: str | None, limit: int) -> list[Row]:
        """The slowest requests that began after `since_ns` (wall), slowest first."""

        def asked(row: Row) -> bool:
            ledger = row.ledger
            return row.slow_ms is not None and ledger.wall_ns >= since_ns and model in (None, ledger.model)

        found = {row.ledger.request_id: row for row in self._queued_rows() if asked(row)}
        bodies = self._select(
            "SELECT body FROM requests WHERE slow_ms IS NOT NULL AND started_ns >= ?1 AND (?2 IS NULL OR model = ?2) "
            "ORDER BY slow_ms DESC LIMIT ?3",
            since_ns,
            model,
            limit,
        )
        for row in map(decode_row, bodies):
            found.setdefault(row.ledger.request_id, row)
        return sorted(found.values(), key=lambda row: -(row.slow_ms or 0))[:limit]

    def latest(self, limit: int) -> list[Row]:
        """The requests that ended last; newest beginning first."""
        found = {row.ledger.request_id: row for row in self._queued_rows()}
        for row in map(decode_row, self._select("SELECT body FROM requests ORDER BY id DESC LIMIT ?1", limit)):
            found.setdefault(row.ledger.request_id, row)
        return sorted(found.values(), key=lambda row: -row.ledger.wall_ns)[:limit]

    def spans_of(self, trace_id: str) -> list[Span]:
        """The engine spans that are kept of a trace, each once, by start."""
        found = {
            span.span_id: span
            for job in self._jobs()
            if isinstance(job, AddSpans) and job.trace_id == trace_id
            for span in job.spans
        }
        bodies = self._select(
            "SELECT body FROM spans WHERE trace_seq = (SELECT seq FROM traces WHERE trace_id = ?1) ORDER BY id",
            trace_id,
        )
        for body in bodies:
            found |= {span.span_id: span for span in _decode_spans(body)}
        return sorted(found.values(), key=lambda span: span.start_ns)

    def _jobs(self) -> list[Job]:
        with self._changed:
            return [*self._writing, *self._queue]

    def _queued_rows(self) -> Iterable[Row]:
        return (job.row for job in self._jobs() if isinstance(job, AddRow | ReplaceRow))

    def _select(self, query: str, *values: object) -> list[bytes]:
        with self._reading:
            return [body for (body,) in self._reader.execute(query, values)]

    # Writing, on the store's own thread

    def _run(self) -> None:
        while self._take_batch():
            self._write(self._writing)
            with self._changed:
                self._writing = []
                self._changed.notify_all()

    def _take_batch(self) -> bool:
        """Waits for a batch and moves it to `_writing`; False when closing and all is written."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closing or self._hurried or len(self._queue) >= MAX_BATCH, BATCH_SECONDS
            )
            self._writing = [self._queue.popleft() for _ in range(min(len(self._queue), MAX_BATCH))]
            self._hurried = self._hurried and bool(self._queue)
            return bool(self._writing) or not self._closing

    def _write(self, jobs: list[Job]) -> None:
        """One transaction with all the jobs, or, when the file refuses it, none of them."""
        if not jobs:
            return
        late: list[tuple[AddLateSpans, bool]] = []
        unknown = 0
        try:
            self._writer.execute("BEGIN IMMEDIATE")
            for job in jobs:
                if isinstance(job, AddLateSpans):
                    stand_ins_left = self._stand_ins_left(job.trace_id)
                    if stand_ins_left is None:
                        unknown += 1
                        continue
                    late.append((job, stand_ins_left))
                for statement, values in _statements(job):
                    self._writer.execute(statement, values)
            self._trim()
            self._writer.execute("COMMIT")
        except (sqlite3.Error, ValueError, OverflowError) as error:
            self._give_up(jobs, error)
            return
        if unknown:
            self._dropped("unknown_trace", unknown)
        for added, stand_ins_left in late:
            self._late_stored(added.spans, stand_ins_left)

    def _stand_ins_left(self, trace_id: str) -> bool | None:
        """Of a kept trace; None when the trace is not kept."""
        found = self._writer.execute("SELECT stand_ins_left FROM traces WHERE trace_id = ?", (trace_id,)).fetchone()
        return None if found is None else bool(found[0])

    def _trim(self) -> None:
        """The oldest leave: AUTOINCREMENT never reuses a number, so age is distance from the newest."""
        self._writer.execute(
            "DELETE FROM requests WHERE id <= (SELECT max(id) FROM requests) - ?",
            (self._max_rows,),
        )
        for table, key in (("spans", "trace_seq"), ("traces", "seq")):
            self._writer.execute(
                f"DELETE FROM {table} WHERE {key} <= (SELECT max(seq) FROM traces) - ?",  # noqa: S608
                (self._max_traces,),
            )

    def _give_up(self, jobs: list[Job], error: Exception) -> None:
        if self._writer.in_transaction:
            self._writer.execute("ROLLBACK")
        text = str(error)
        reason = "disk_full" if "full" in text else "store_locked" if "locked" in text else "store_error"
        log.error("%d records could not be stored (%s): %s", len(jobs), reason, text)
        self._dropped(reason, len(jobs))


def _statements(job: Job) -> list[tuple[str, tuple[object, ...]]]:
    if isinstance(job, AddRow):
        return [(_INSERT, columns_of(job.row))]
    if isinstance(job, ReplaceRow):
        return [(_UPDATE, (*columns_of(job.row), job.row.ledger.request_id))]
    stand_ins_left = isinstance(job, AddSpans) and job.stand_ins_left
    found: list[tuple[str, tuple[object, ...]]] = [(_KEEP_TRACE, (job.trace_id, stand_ins_left))]
    if job.spans:
        add = "INSERT INTO spans (trace_seq, body) SELECT seq, ? FROM traces WHERE trace_id = ?"
        found.append((add, (_encode_spans(job.spans), job.trace_id)))
    return found


def _ids(row: Row) -> tuple[str | None, ...]:
    return row.ledger.request_id, row.ledger.client_request_id, row.ledger.trace_id
