"""The store over time: what grows old leaves, earlier files are brought up, and a kill leaves nothing half-written."""

from __future__ import annotations

import logging
import os
import random
import signal
import sqlite3
import time
from pathlib import Path

import msgspec
import pytest
from ledgers import HERE, WALL_NS, numbered, timings, whole
from prometheus_client import CollectorRegistry
from store_rig import Rig, count, row, span

from settings.schema import Settings
from tracing.clock import SystemClock
from tracing.ledger import Closed, Outcome
from tracing.observer import schema
from tracing.observer import store as store_module
from tracing.observer.core import Observer
from tracing.observer.rows import COLUMNS, columns_of, decode_row, encode_row
from tracing.observer.schema import VERSION, StoreError
from tracing.observer.store import AddLateSpans, AddRow, AddSpans
from tracing.spans import Span

HOUR_NS = 3600 * 10**9


def aged(number: int, hours: float) -> AddRow:
    """A request that began so long ago."""
    return AddRow(row(numbered(number, wall_ns=WALL_NS - round(hours * HOUR_NS))))


def until(true: object, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not true():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_rows_and_traces_leave_when_they_are_too_old(tmp_path: Path) -> None:
    path = tmp_path / "t.sqlite"
    rig = Rig(path, max_age_seconds=3600)
    for number, hours in enumerate((0.1, 0.5, 0.9, 1.1, 30)):
        rig.store.put(aged(number, hours))
    rig.store.put(AddSpans("a" * 32, [span(1)]))
    rig.store.flush()
    rig.clock.advance_ms(store_module.TRIM_SECONDS * 1e3)
    until(lambda: count(path, "requests") == 3)
    assert count(path, "spans") == count(path, "traces") == 1
    rig.clock.advance_ms(3600e3)
    until(lambda: count(path, "requests") == count(path, "traces") == count(path, "spans") == 0)
    rig.store.close()


def test_a_great_many_old_rows_leave_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.sqlite"
    monkeypatch.setattr(store_module, "MAX_TRIM", 10)
    rig = Rig(path, max_age_seconds=3600)
    for number in range(95):
        rig.store.put(aged(number, 0.5))
    rig.store.flush()
    rig.clock.advance_ms(3600e3)
    until(lambda: count(path, "requests") == 0)
    rig.store.close()


def version_one(path: Path) -> None:
    """A file as the first version of the program left it: two requests, one with a kept trace."""
    connection = sqlite3.connect(path, isolation_level=None)
    for statement in schema._FIRST.strip().split(";\n"):
        connection.execute(statement)
    connection.execute("INSERT INTO schema_version VALUES (1)")
    for number in (1, 2):
        made = row(numbered(number, wall_ns=WALL_NS + number))
        body = msgspec.msgpack.decode(encode_row(made))
        del body["timeline"]["origin"]  # this version did not know it
        values = [*columns_of(made)[:-1], msgspec.msgpack.encode(body)]
        connection.execute(
            f"INSERT INTO requests ({', '.join(COLUMNS)}) VALUES ({', '.join('?' * len(COLUMNS))})",  # noqa: S608
            values,
        )
    trace_id = numbered(2).trace_id
    connection.execute("INSERT INTO traces (trace_id, stand_ins_left) VALUES (?, 0)", (trace_id,))
    body = msgspec.msgpack.encode([span(7, trace_id)])
    connection.execute("INSERT INTO spans (trace_seq, body) SELECT seq, ? FROM traces", (body,))
    connection.close()


def layout(path: Path) -> list[tuple[str, ...]]:
    with sqlite3.connect(path) as connection:
        return sorted(connection.execute("SELECT type, name, tbl_name, coalesce(sql, '') FROM sqlite_master"))


def test_a_file_of_the_first_version_is_brought_up_with_all_that_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "old.sqlite"
    version_one(path)
    rig = Rig(path)
    (found,) = rig.store.find("req_2")
    assert found.timeline.ttft == pytest.approx(0.0815)
    assert found.timeline.origin is None
    assert [one.name for one in rig.store.spans_of(numbered(2).trace_id)] == ["span 7"]
    rig.store.put(AddRow(row(numbered(3))))
    rig.store.close()
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT version FROM schema_version").fetchall() == [(VERSION,)]
        assert connection.execute("SELECT kept_ns FROM traces").fetchone() == (WALL_NS + 2,), "it is as old as it is"
        assert connection.execute("SELECT count(*) FROM requests").fetchone() == (3,)
    Rig(tmp_path / "new.sqlite").store.close()
    assert layout(path) == layout(tmp_path / "new.sqlite")


def test_a_file_that_cannot_be_brought_up_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "old.sqlite"
    version_one(path)
    before = layout(path)
    broken = {1: "CREATE TABLE extra (x INTEGER);\nALTER TABLE nowhere ADD COLUMN y INTEGER;\n"}
    monkeypatch.setattr(schema, "MIGRATIONS", broken)
    with pytest.raises(StoreError, match=r"old\.sqlite cannot be opened: no such table"):
        Rig(path)
    assert layout(path) == before


def test_a_file_that_another_process_holds_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.sqlite"
    Rig(path).store.close()
    monkeypatch.setattr(schema, "BUSY_TIMEOUT_SECONDS", 0.05)
    blocker = sqlite3.connect(path, isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match=r"t\.sqlite cannot be opened: database is locked"):
        Rig(path)
    blocker.close()


def test_a_row_that_cannot_be_read_does_not_hide_the_others(tmp_path: Path) -> None:
    path = tmp_path / "t.sqlite"
    rig = Rig(path)
    for number in (1, 2):
        rig.store.put(AddRow(row(numbered(number, client_request_id="mine"))))
    rig.store.flush()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE requests SET body = x'00ff' WHERE request_id = 'req_1'")
    assert [found.ledger.request_id for found in rig.store.find("mine")] == ["req_2"]
    rig.store.close()


QUESTIONS = [
    ({}, ["req_5", "req_3", "req_4", "req_2", "req_1"]),
    ({"by": "ttft"}, ["req_3", "req_4", "req_2", "req_1"]),
    ({"by": "e2e"}, ["req_5", "req_1", "req_2", "req_3", "req_4"]),
    ({"by": "tpot"}, ["req_4", "req_1", "req_2", "req_3"]),
    ({"model": "a"}, ["req_2", "req_1"]),
    ({"key_alias": "k"}, ["req_4", "req_1"]),
    ({"outcome": "upstream_error"}, ["req_2"]),
    ({"stage": "relay"}, ["req_3", "req_4"]),
    ({"model": "m", "stage": "relay", "by": "ttft"}, ["req_3", "req_4"]),
    ({"model": "a", "key_alias": "k", "by": "e2e"}, ["req_1"]),
]


@pytest.mark.parametrize("when", ["queued", "written", "half of them written"])
def test_the_slowest_by_what_they_are_asked_for(tmp_path: Path, when: str) -> None:
    rig = Rig(tmp_path / "t.sqlite")
    mades = [
        numbered(1, model="a", key_alias="k", first_token_written=90.0),
        numbered(2, model="a", outcome=Outcome.UPSTREAM_ERROR, first_token_written=100.0),
        numbered(3, first_token_written=300.0),
        numbered(4, key_alias="k", first_token_written=200.0, last_token=300.0),
        msgspec.structs.replace(whole(finish=900.0), request_id="req_5"),
    ]
    for number, made in enumerate(mades):
        rig.store.put(AddRow(row(made)))
        if when == "half of them written" and number == 2:
            rig.store.flush()
    if when == "written":
        rig.store.flush()
    for asked, expected in QUESTIONS:
        found = rig.store.slow(since_ns=0, limit=10, **{"model": None, **asked})  # type: ignore[arg-type]
        ids = [one.ledger.request_id for one in found]
        assert sorted(ids) == sorted(expected), asked
        assert ids[0] == expected[0], asked
    rig.store.close()


def test_spans_of_nobody_known_leave_half_of_the_queue_to_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "BATCH_SECONDS", 60.0)
    rig = Rig(tmp_path / "t.sqlite", max_queue=10)
    assert [rig.store.put(AddLateSpans("c" * 32, [span(1)])) for _ in range(8)] == [True] * 5 + [False] * 3
    assert all(rig.store.put(AddRow(row(numbered(number)))) for number in range(5))
    assert rig.dropped == {"store_queue_full": 3}
    rig.store.close()


def test_a_fault_that_goes_on_is_told_once_a_minute(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(tmp_path / "t.sqlite")
    rig.store._writer.execute("PRAGMA max_page_count = 30")
    with caplog.at_level(logging.ERROR):
        for number in range(600):
            rig.store.put(AddRow(row(numbered(number))))
            if number % 100 == 99:
                rig.store.flush()
        assert rig.dropped["disk_full"] >= 200
        assert caplog.text.count("could not be stored (disk_full") == 1
    rig.store.close()


def spans_below(made_span_id: str, trace_id: str, number: int) -> list[Span]:
    base = number << 8
    parent = f"{base + 1:016x}"
    return [
        Span(trace_id, parent, "llm_request", 1, 2, made_span_id),
        *(Span(trace_id, f"{base + n:016x}", name, 1, 2, parent) for n, name in ((2, "queue"), (3, "prefill"))),
    ]


def load_until_killed(state_dir: Path, first: int) -> None:
    """An observer that takes requests and spans as fast as it can; runs in a process of its own and never returns."""
    settings = Settings.model_validate({"state_dir": state_dir, "logging": {"level": "warning"}})
    observer = Observer(settings, SystemClock(), CollectorRegistry(), None)
    observer.store.open()
    number = first
    while True:
        for _ in range(50):
            made = numbered(number, timings=timings(HERE))
            observer.take_records([Closed(made)])
            observer.take_spans(spans_below(made.attempts[-1].span_id, made.trace_id, number))
            number += 1
        observer.tick()
        time.sleep(0.005)


def test_killed_twenty_times_under_load_no_trace_is_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "BATCH_SECONDS", 0.01)
    random_ms = random.Random(7)
    path = tmp_path / "traces.sqlite"
    written = 0
    for life in range(20):
        pid = os.fork()
        if not pid:
            try:
                load_until_killed(tmp_path, life * 1_000_000)
            finally:
                os._exit(1)
        try:
            before = written
            until(lambda: path.exists() and _rows(path) > before, 20)  # noqa: B023
            time.sleep(random_ms.uniform(0, 0.05))
        finally:
            os.kill(pid, signal.SIGKILL)
            assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])
        rig = Rig(path, max_rows=200_000, max_traces=20_000)
        rig.store.close()
        with sqlite3.connect(path) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            rows = {decode_row(body).ledger.trace_id for (body,) in connection.execute("SELECT body FROM requests")}
            assert len(rows) > written
            written = len(rows)
            stored = list(
                connection.execute("SELECT t.trace_id, s.body FROM traces t JOIN spans s ON s.trace_seq = t.seq")
            )
        assert stored
        for trace_id, body in stored:
            spans = msgspec.msgpack.decode(body, type=list[Span])
            assert [one.name for one in spans] == ["llm_request", "queue", "prefill"]
            assert trace_id in rows, "its request was written before it"


def _rows(path: Path) -> int:
    try:
        return count(path, "requests")
    except sqlite3.OperationalError:  # the file is there and has no tables yet
        return 0


def test_the_layout_that_readers_of_the_file_rely_on_is_there(tmp_path: Path) -> None:
    Rig(tmp_path / "t.sqlite").store.close()
    names = {name for _, name, _, _ in layout(tmp_path / "t.sqlite")}
    assert {"requests", "traces", "spans", "requests_by_key", "requests_by_stage", "traces_by_time"} <= names
