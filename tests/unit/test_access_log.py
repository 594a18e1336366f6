"""The access log: a line per request, a bounded file, and no harm when it can't be written."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from ledgers import HERE, ledger, numbered

from tracing.ledger import Ledger
from tracing.observer import access_log as module
from tracing.observer.access_log import AccessLog
from tracing.observer.rows import Row
from tracing.stages import timeline_of


def row(made: Ledger) -> Row:
    return Row(made, timeline_of(made, HERE), HERE, True)


def ids(path: Path) -> list[str]:
    return [json.loads(line)["request_id"] for line in path.read_text().splitlines()]


def test_each_request_is_one_json_line(tmp_path: Path) -> None:
    log = AccessLog(tmp_path / "access.log")
    log.add(row(ledger(client_request_id="mine", path='/v1/"quoted"\n')))
    log.add(row(numbered(2)))
    log.flush()
    first, second = map(json.loads, (tmp_path / "access.log").read_text().splitlines())
    assert first["client_request_id"] == "mine"
    assert first["path"] == '/v1/"quoted"\n'
    assert first["ttft_ms"] == 81.5
    assert second["request_id"] == "req_2"
    assert stat.S_IMODE((tmp_path / "access.log").stat().st_mode) == 0o600


def test_a_full_file_becomes_the_one_predecessor(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    log = AccessLog(path, max_bytes=2500)
    for number in range(9):
        log.add(row(numbered(number)))
        log.flush()
    kept = ids(tmp_path / "access.log.1") + ids(path)
    assert kept == [f"req_{number}" for number in range(9)][-len(kept) :]
    assert len(kept) < 9
    assert path.stat().st_size <= 2500
    assert sorted(file.name for file in tmp_path.iterdir()) == ["access.log", "access.log.1"]


def test_lines_over_the_bound_and_lines_that_cannot_be_written_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_LINES", 3)
    log = AccessLog(tmp_path / "no-folder" / "access.log")
    for number in range(5):
        log.add(row(numbered(number)))
    assert log.lost == 2
    log.flush()
    assert log.lost == 5
