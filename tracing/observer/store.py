"""The store: a row for every request in a capped ring, and the engine spans of kept traces, in SQLite.

One thread of its own writes, in transactions of at most BATCH_SECONDS. The queue to it is bounded: when it is full, or
the disk is, or another process holds the file, work is dropped and counted, and requests go on. Rows and traces leave
by number and by age. Readers see what is queued before what is on disk, so a request can be found as soon as it has
ended. A kill at any time costs what was queued: a transaction is on disk whole or not at all.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from tracing.clock import Clock
from tracing.observer.rows import COLUMNS, Row, columns_of, decode_row, facts_of
from tracing.observer.schema import connect, open_database
from tracing.spans import Span

BATCH_SECONDS = 0.2
MAX_QUEUE = 20_000
MAX_BATCH = 2_000
TRIM_SECONDS = 60
"""How often the age of what is stored is looked at."""
MAX_TRIM = 5_000
"""Rows that leave for their age in one transaction, so that none takes long."""
MAX_NAMED = 500
"""Ids that are asked for in one query."""
LOG_SECONDS = 60
"""Between two lines of the log about the same fault."""

_INSERT = f"INSERT INTO requests ({', '.join(COLUMNS)}) VALUES ({', '.join('?' * len(COLUMNS))})"  # noqa: S608
_UPDATE = f"UPDATE requests SET {', '.join(f'{name} = ?' for name in COLUMNS)} WHERE request_id = ?"  # noqa: S608
_KEEP_TRACE = (
    "INSERT INTO traces (trace_id, stand_ins_left, kept_ns) VALUES (?, ?, ?) ON CONFLICT (trace_id) "
    "DO UPDATE SET stand_ins_left = max(stand_ins_left, excluded.stand_ins_left)"
)
_ANY_ID = "request_id = :id OR client_request_id = :id OR trace_id = :id"

_FAULTS = {
    sqlite3.SQLITE_FULL: "disk_full",
    sqlite3.SQLITE_BUSY: "store_locked",
    sqlite3.SQLITE_LOCKED: "store_locked",
}
ORDERS = {"slow": "slow_ms", "ttft": "ttft_ms", "e2e": "e2e_ms", "tpot": "tpot_ms"}
"""What the slowest may be asked for by -> column. slow: TTFT, else E2E."""

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
        max_age_seconds: float,
        clock: Clock,
        dropped: Dropped,
        late_stored: LateStored = lambda spans, stand_ins_left: None,
        max_queue: int = MAX_QUEUE,
    ) -> None:
        self._path = path
        self._max_rows = max_rows
        self._max_traces = max_traces
        self._max_age_ns = round(max_age_seconds * 1e9)
        self._clock = clock
        self._trimmed_at_ns = 0
        self._logged_at_ns: dict[str, int] = {}
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
        """Queues one job; False when it had to be dropped. Never waits.

        Spans of nobody known have half of the queue, so that a flood of them does not drive out requests.
        """
        room = self._max_queue // 2 if isinstance(job, AddLateSpans) else self._max_queue
        with self._changed:
            if len(self._queue) < room and not self._closing:
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
        query = f"SELECT body FROM requests WHERE {_ANY_ID} ORDER BY id DESC LIMIT 100"  # noqa: S608
        for row in self._rows(query, {"id": any_id}):
            found.setdefault(row.ledger.request_id, row)
        return sorted(found.values(), key=lambda row: row.ledger.wall_ns)

    def named(self, request_ids: Sequence[str]) -> list[Row]:
        """The requests with these ids of ours, in no order; those that are not known are missing."""
        wanted = set(request_ids)
        found = {row.ledger.request_id: row for row in self._queued_rows() if row.ledger.request_id in wanted}
        left = sorted(wanted - found.keys())
        for first in range(0, len(left), MAX_NAMED):
            chunk = {f"id{number}": one for number, one in enumerate(left[first : first + MAX_NAMED])}
            marks = ", ".join(f":{name}" for name in chunk)
            query = f"SELECT body FROM requests WHERE request_id IN ({marks})"  # noqa: S608  only names of ours
            for row in self._rows(query, dict(chunk)):
                found.setdefault(row.ledger.request_id, row)
        return list(found.values())

    def slow(
        self,
        *,
        since_ns: int,
        model: str | None,
        limit: int,
        by: str = "slow",
        key_alias: str | None = None,
        outcome: str | None = None,
        stage: str | None = None,
    ) -> list[Row]:
        """The slowest requests that began after `since_ns` (wall), slowest first; `by` is one of ORDERS.

        `stage`: whose time it was most of (the dominant stage).
        """
        column = ORDERS[by]
        asked = {"model": model, "key_alias": key_alias, "outcome": outcome, "dominant": stage}
        asked = {name: value for name, value in asked.items() if value is not None}

        def is_asked(row: Row) -> bool:
            facts = facts_of(row)
            if facts[column] is None or row.ledger.wall_ns < since_ns:
                return False
            return all(facts[name] == value for name, value in asked.items())

        found = {row.ledger.request_id: row for row in self._queued_rows() if is_asked(row)}
        conditions = "".join(f" AND {name} = :{name}" for name in asked)
        query = (
            f"SELECT body FROM requests WHERE {column} IS NOT NULL AND started_ns >= :since{conditions} "  # noqa: S608
            f"ORDER BY {column} DESC LIMIT :limit"
        )
        for row in self._rows(query, {"since": since_ns, "limit": limit, **asked}):
            found.setdefault(row.ledger.request_id, row)
        return sorted(found.values(), key=lambda row: -float(facts_of(row)[column] or 0))[:limit]  # type: ignore[arg-type]

    def latest(self, limit: int) -> list[Row]:
        """The requests that ended last; newest beginning first."""
        found = {row.ledger.request_id: row for row in self._queued_rows()}
        for row in self._rows("SELECT body FROM requests ORDER BY id DESC LIMIT :limit", {"limit": limit}):
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
            "SELECT body FROM spans WHERE trace_seq = (SELECT seq FROM traces WHERE trace_id = :id) ORDER BY id",
            {"id": trace_id},
        )
        for body in bodies:
            found |= {span.span_id: span for span in _decode_spans(body)}
        return sorted(found.values(), key=lambda span: span.start_ns)

    def _jobs(self) -> list[Job]:
        with self._changed:
            return [*self._writing, *self._queue]

    def _queued_rows(self) -> Iterable[Row]:
        return (job.row for job in self._jobs() if isinstance(job, AddRow | ReplaceRow))

    def _rows(self, query: str, values: dict[str, object]) -> list[Row]:
        """Rows that can still be read: one that cannot, of another version or damaged, does not hide the others."""
        rows = []
        for body in self._select(query, values):
            try:
                rows.append(decode_row(body))
            except msgspec.MsgspecError as error:
                self._tell("unreadable", "a stored request cannot be read and is left out: %s", error)
        return rows

    def _select(self, query: str, values: dict[str, object]) -> list[bytes]:
        with self._reading:
            return [body for (body,) in self._reader.execute(query, values)]

    # Writing, on the store's own thread

    def _run(self) -> None:
        while self._take_batch():
            self._write(self._writing)
            self._trim_by_age()
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
                for statement, values in _statements(job, self._clock.wall_ns()):
                    self._writer.execute(statement, values)
            self._trim_by_number()
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

    def _trim_by_age(self) -> None:
        """What is too old leaves, in pieces; also while nothing is written."""
        now = self._clock.mono_ns()
        if self._trimmed_at_ns and now - self._trimmed_at_ns < TRIM_SECONDS * 1e9:
            return
        oldest = self._clock.wall_ns() - self._max_age_ns
        try:
            self._writer.execute("BEGIN IMMEDIATE")
            gone = self._writer.execute(
                "DELETE FROM requests WHERE id IN "
                "(SELECT id FROM requests WHERE started_ns < ? ORDER BY started_ns LIMIT ?)",
                (oldest, MAX_TRIM),
            ).rowcount
            for table, key in (("spans", "trace_seq"), ("traces", "seq")):
                self._writer.execute(
                    f"DELETE FROM {table} WHERE {key} IN (SELECT seq FROM traces WHERE kept_ns < ? LIMIT ?)",  # noqa: S608
                    (oldest, MAX_TRIM),
                )
            self._writer.execute("COMMIT")
        except sqlite3.Error as error:
            self._roll_back()
            self._tell(_fault(error), "what is too old could not be removed from the trace store: %s", error)
            gone = 0
        if gone < MAX_TRIM:
            self._trimmed_at_ns = now

    def _trim_by_number(self) -> None:
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
        self._roll_back()
        reason = _fault(error)
        self._tell(reason, "records could not be stored (%s, %d of them now): %s", reason, len(jobs), error)
        self._dropped(reason, len(jobs))

    def _roll_back(self) -> None:
        if self._writer.in_transaction:
            self._writer.execute("ROLLBACK")

    def _tell(self, fault: str, message: str, *values: object) -> None:
        """A line in the log, at most one a minute for a fault that goes on."""
        now = self._clock.mono_ns()
        if now - self._logged_at_ns.get(fault, -(10**18)) >= LOG_SECONDS * 1e9:
            self._logged_at_ns[fault] = now
            log.error(message, *values)


def _fault(error: Exception) -> str:
    """Label of what went wrong."""
    return _FAULTS.get(getattr(error, "sqlite_errorcode", 0) & 0xFF, "store_error")


def _statements(job: Job, now_ns: int) -> list[tuple[str, tuple[object, ...]]]:
    if isinstance(job, AddRow):
        return [(_INSERT, columns_of(job.row))]
    if isinstance(job, ReplaceRow):
        return [(_UPDATE, (*columns_of(job.row), job.row.ledger.request_id))]
    stand_ins_left = isinstance(job, AddSpans) and job.stand_ins_left
    found: list[tuple[str, tuple[object, ...]]] = [(_KEEP_TRACE, (job.trace_id, stand_ins_left, now_ns))]
    if job.spans:
        add = "INSERT INTO spans (trace_seq, body) SELECT seq, ? FROM traces WHERE trace_id = ?"
        found.append((add, (_encode_spans(job.spans), job.trace_id)))
    return found


def _ids(row: Row) -> tuple[str | None, ...]:
    return row.ledger.request_id, row.ledger.client_request_id, row.ledger.trace_id
