"""The store: findable at once, bounded, and never in the way."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from ledgers import ledger, numbered, whole
from store_rig import Rig, count, row, span

from tracing.observer import store as store_module
from tracing.observer.schema import StoreError
from tracing.observer.store import AddLateSpans, AddRow, AddSpans, ReplaceRow
from tracing.spans import Span, SpanEvent, SpanKind, SpanLink, SpanStatus


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path / "traces.sqlite")
    yield made
    made.store.close()


def test_a_row_is_found_by_any_of_its_ids_at_once_and_after_it_was_written(rig: Rig) -> None:
    made = ledger(client_request_id="mine")
    assert rig.store.put(AddRow(row(made)))
    for _ in ("queued", "written"):
        for any_id in ("req_1", "mine", made.trace_id):
            assert rig.store.find(any_id) == [row(made)]
        assert rig.store.find("req_2") == []
        assert rig.store.flush()


def test_every_match_is_given_once_whether_queued_or_written(rig: Rig) -> None:
    rig.store.put(AddRow(row(numbered(1, client_request_id="again"))))
    rig.store.flush()
    rig.store.put(AddRow(row(numbered(2, client_request_id="again"))))
    assert {found.ledger.request_id for found in rig.store.find("again")} == {"req_1", "req_2"}


def test_a_row_that_is_replaced_shows_what_became_known(rig: Rig) -> None:
    rig.store.put(AddRow(row(ledger(timings=None))))
    rig.store.flush()
    rig.store.put(ReplaceRow(row(ledger())))
    assert rig.store.find("req_1") == [row(ledger())]
    rig.store.flush()
    assert rig.store.find("req_1") == [row(ledger())]


def test_a_row_that_is_replaced_before_it_was_written_shows_what_became_known(rig: Rig) -> None:
    rig.store.put(AddRow(row(ledger(timings=None))))
    rig.store.put(ReplaceRow(row(ledger())))
    assert rig.store.find("req_1") == [row(ledger())]


def test_the_slowest_come_first_by_ttft_or_by_e2e_of_whole_answers(rig: Rig) -> None:
    rig.store.put(AddRow(row(numbered(1, first_token_written=90.0))))
    rig.store.put(AddRow(row(numbered(2, first_token_written=120.0))))
    rig.store.flush()
    slow_whole = whole(request_id="req_3")
    rig.store.put(AddRow(row(slow_whole)))
    found = rig.store.slow(since_ns=0, model=None, limit=10)
    assert [one.ledger.request_id for one in found] == ["req_3", "req_2", "req_1"]
    assert [one.slow_ms for one in found] == [186.0, 120.0, 90.0]
    assert len(rig.store.slow(since_ns=0, model=None, limit=2)) == 2
    assert rig.store.slow(since_ns=slow_whole.wall_ns + 1, model=None, limit=10) == []
    assert rig.store.slow(since_ns=0, model="another", limit=10) == []


def test_rows_are_a_ring_and_the_oldest_leave(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "t.sqlite", max_rows=100)
    for number in range(250):
        rig.store.put(AddRow(row(numbered(number))))
        if number % 90 == 0:
            rig.store.flush()
    rig.store.close()
    assert count(tmp_path / "t.sqlite", "requests") == 100
    again = Rig(tmp_path / "t.sqlite", max_rows=100)
    assert again.store.find("req_149") == []
    assert len(again.store.find("req_150")) == 1
    again.store.close()


def test_traces_are_a_ring_and_their_spans_leave_with_them(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "t.sqlite", max_traces=10)
    for number in range(25):
        rig.store.put(AddSpans(f"{number:032x}", [span(1), span(2)]))
    rig.store.flush()
    assert rig.store.spans_of(f"{14:032x}") == []
    assert len(rig.store.spans_of(f"{15:032x}")) == 2
    rig.store.close()
    assert count(tmp_path / "t.sqlite", "traces") == 10
    assert count(tmp_path / "t.sqlite", "spans") == 10


def test_a_span_comes_back_with_all_that_it_came_with(rig: Rig) -> None:
    whole_span = Span(
        trace_id="a" * 32,
        span_id="b" * 16,
        name="llm_request",
        start_ns=1_796_000_000_000_000_000,
        end_ns=1_796_000_000_000_000_001,
        parent_id="c" * 16,
        kind=SpanKind.SERVER,
        attributes={"text": "ü", "int": 2**62, "float": 1.0, "bool": True, "list": [1, 2], "map": {"a": [True]}},
        events=[SpanEvent("preempted", 5, {"n": 1})],
        links=[SpanLink("d" * 32, "e" * 16)],
        status=SpanStatus.ERROR,
        status_message="aborted",
        resource={"service.name": "engine"},
        scope="tokenline.engine",
        scope_version="1",
        trace_state="a=b",
    )
    rig.store.put(AddSpans("a" * 32, [whole_span]))
    assert rig.store.spans_of("a" * 32) == [whole_span]
    rig.store.flush()
    (found,) = rig.store.spans_of("a" * 32)
    assert found == whole_span
    assert isinstance(found.attributes["float"], float)


def test_spans_that_come_in_parts_or_twice_are_each_there_once(rig: Rig) -> None:
    rig.store.put(AddSpans("a" * 32, [span(2)]))
    rig.store.flush()
    rig.store.put(AddSpans("a" * 32, [span(1), span(2)]))
    assert [one.name for one in rig.store.spans_of("a" * 32)] == ["span 1", "span 2"]
    rig.store.flush()
    assert [one.name for one in rig.store.spans_of("a" * 32)] == ["span 1", "span 2"]


def test_late_spans_are_added_to_a_kept_trace_and_those_of_unknown_traces_are_counted(rig: Rig) -> None:
    rig.store.put(AddSpans("a" * 32, []))
    rig.store.put(AddSpans("b" * 32, [], stand_ins_left=True))
    rig.store.put(AddSpans("b" * 32, []))
    rig.store.put(AddLateSpans("a" * 32, [span(1)]))
    rig.store.put(AddLateSpans("b" * 32, [span(2)]))
    rig.store.put(AddLateSpans("c" * 32, [span(3)]))
    rig.store.flush()
    assert [one.name for one in rig.store.spans_of("a" * 32)] == ["span 1"]
    assert rig.late == [(["span 1"], False), (["span 2"], True)]
    assert rig.dropped == {"unknown_trace": 1}
    assert rig.store.spans_of("c" * 32) == []


def test_a_full_queue_drops_and_counts_and_never_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "BATCH_SECONDS", 60.0)
    rig = Rig(tmp_path / "t.sqlite", max_queue=5)
    results = [rig.store.put(AddRow(row(numbered(number)))) for number in range(8)]
    assert results == [True] * 5 + [False] * 3
    assert rig.dropped == {"store_queue_full": 3}
    rig.store.close()
    assert count(tmp_path / "t.sqlite", "requests") == 5


def test_a_full_disk_drops_and_counts_and_writing_goes_on_when_there_is_room(tmp_path: Path) -> None:
    path = tmp_path / "t.sqlite"
    rig = Rig(path)
    rig.store._writer.execute("PRAGMA max_page_count = 30")
    for number in range(400):
        rig.store.put(AddRow(row(numbered(number))))
    assert rig.store.flush()
    assert rig.dropped["disk_full"] > 0
    assert rig.store.is_open
    rig.store._writer.execute("PRAGMA max_page_count = 100000")
    rig.store.put(AddRow(row(numbered(1000))))
    rig.store.flush()
    rig.store.close()
    again = Rig(path)
    assert len(again.store.find("req_1000")) == 1
    again.store.close()


def test_a_locked_file_drops_and_counts(tmp_path: Path) -> None:
    path = tmp_path / "t.sqlite"
    rig = Rig(path)
    rig.store._writer.execute("PRAGMA busy_timeout = 50")
    blocker = sqlite3.connect(path, isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    rig.store.put(AddRow(row(ledger())))
    assert rig.store.flush()
    blocker.execute("ROLLBACK")
    blocker.close()
    assert rig.dropped == {"store_locked": 1}
    rig.store.close()


def test_what_is_queued_at_close_is_written(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "t.sqlite")
    for number in range(3000):
        rig.store.put(AddRow(row(numbered(number))))
    rig.store.close()
    assert rig.dropped == {}
    with sqlite3.connect(tmp_path / "t.sqlite") as connection:
        assert connection.execute("SELECT count(*) FROM requests").fetchone() == (1000,)
        assert connection.execute("SELECT max(id) FROM requests").fetchone() == (3000,)


def test_a_file_that_is_no_database_is_moved_aside_and_a_new_one_begun(tmp_path: Path) -> None:
    path = tmp_path / "t.sqlite"
    path.write_bytes(b"not a database, but somebody's file" * 100)
    rig = Rig(path)
    rig.store.put(AddRow(row(ledger())))
    rig.store.flush()
    assert len(rig.store.find("req_1")) == 1
    rig.store.close()
    assert (tmp_path / "t.sqlite.damaged").read_bytes().startswith(b"not a database")


def test_a_file_of_a_later_version_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "t.sqlite"
    Rig(path).store.close()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE schema_version SET version = 99")
    with pytest.raises(StoreError, match=r"t\.sqlite has schema version 99"):
        Rig(path)


def test_a_path_that_cannot_be_written_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "folder.sqlite").mkdir()
    with pytest.raises(StoreError, match=r"folder\.sqlite cannot be opened"):
        Rig(tmp_path / "folder.sqlite")


def test_the_questions_people_ask_are_answered_by_an_index(rig: Rig) -> None:
    questions = [
        "SELECT body FROM requests WHERE request_id = 'x' OR client_request_id = 'x' OR trace_id = 'x'",
        "SELECT body FROM requests WHERE started_ns > 5",
        "SELECT body FROM requests WHERE slow_ms IS NOT NULL ORDER BY slow_ms DESC LIMIT 5",
        "SELECT body FROM requests WHERE ttft_ms IS NOT NULL AND started_ns >= 5 ORDER BY ttft_ms DESC LIMIT 5",
        "SELECT body FROM requests WHERE e2e_ms IS NOT NULL AND started_ns >= 5 ORDER BY e2e_ms DESC LIMIT 5",
        "SELECT body FROM requests WHERE key_alias = 'k' AND started_ns > 5",
        "SELECT body FROM requests WHERE dominant = 'engine_queue' AND started_ns > 5",
        "SELECT id FROM requests WHERE started_ns < 5 ORDER BY started_ns LIMIT 5",
        "SELECT seq FROM traces WHERE kept_ns < 5 LIMIT 5",
        "SELECT body FROM requests WHERE model = 'm' AND started_ns > 5",
        "SELECT body FROM requests WHERE outcome = 'upstream_error' AND outcome <> 'ok' AND started_ns > 5",
        "SELECT body FROM spans WHERE trace_seq = (SELECT seq FROM traces WHERE trace_id = 'x')",
    ]
    for question in questions:
        plan = rig.store._reader.execute(f"EXPLAIN QUERY PLAN {question}").fetchall()
        steps = [str(step[-1]) for step in plan]
        assert any("INDEX" in step for step in steps), (question, steps)
        assert not any(step in ("SCAN requests", "SCAN spans", "SCAN traces") for step in steps), (question, steps)
