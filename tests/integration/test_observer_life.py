"""The observer begins, ends, is killed, and begins again."""

from __future__ import annotations

import socket
import sqlite3

import pytest
from killing_rig import kill_under_load
from observer_rig import (
    Backend,
    Start,
    WorkerLink,
    here,
    lines_of,
)

from tracing.ledger import Closed


def test_sigterm_writes_and_exports_what_just_came(start: Start, backend: Backend) -> None:
    observer = start(environment={"OTEL_EXPORTER_OTLP_ENDPOINT": backend.url}).wait_healthy()
    link = WorkerLink(observer.settings.intake_socket)
    link.send(*(Closed(here(number)) for number in range(200)))
    observer.find("req_199")
    assert observer.terminate() == 0
    link.close()
    assert not observer.settings.intake_socket.exists()
    with sqlite3.connect(observer.settings.traces_path) as connection:
        assert connection.execute("SELECT count(*) FROM requests").fetchone() == (200,)
    assert len({span.trace_id for span in backend.spans if span.name == "relay"}) == 200
    assert len(lines_of(observer.settings.state_dir / "access.log")) == 200


def test_killed_under_load_the_store_opens_again_with_whole_traces(start: Start) -> None:
    kill_under_load(start, 2)


@pytest.mark.parametrize("setting", ["ops_port", "otlp_port"])
def test_a_port_in_use_is_named_with_its_setting(start: Start, setting: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        observer = start(server={setting: port})
        _, stderr = observer.process.communicate(timeout=20)
    assert observer.process.returncode == 1
    assert f"port {port} of 127.0.0.1 is in use (server.{setting} = {port})" in stderr
    assert "Traceback" not in stderr


def test_a_second_observer_of_one_state_folder_is_refused(start: Start) -> None:
    first = start().wait_healthy()
    second = start()
    _, stderr = second.process.communicate(timeout=20)
    assert second.process.returncode == 1
    assert "another observer already listens on" in stderr
    assert "TOKENLINE_STATE_DIR" in stderr
    link = WorkerLink(first.settings.intake_socket)
    link.send(Closed(here(1)))
    assert first.find("req_1")


def test_with_a_quiet_log_level_there_is_no_access_log(start: Start) -> None:
    observer = start(logging={"level": "warning"}).wait_healthy()
    link = WorkerLink(observer.settings.intake_socket)
    link.send(Closed(here(1)))
    observer.find("req_1")
    assert observer.terminate() == 0
    assert not (observer.settings.state_dir / "access.log").exists()
