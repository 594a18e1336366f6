"""The observer as a process: frames and spans in, metrics, answers and exported traces out."""

from __future__ import annotations

import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ledgers import ledger, numbered, timings
from observer_rig import (
    ADMIN_KEY,
    Backend,
    FakeEngine,
    ObserverProcess,
    WorkerLink,
    closing,
    engine_spans,
    free_port,
    lines_of,
    wait_until,
)

from tracing.clock import host_identity
from tracing.ledger import Closed, Ledger, Outcome, WorkerState

Start = Callable[..., ObserverProcess]
OPENMETRICS = "application/openmetrics-text; version=1.0.0"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    running: list[ObserverProcess] = []

    def begin(**options: Any) -> ObserverProcess:
        running.append(ObserverProcess(tmp_path / "state", **options))
        return running[-1]

    yield begin
    for one in running:
        one.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObserverProcess]:
    """One observer for tests that only ask or add; each uses ids of its own."""
    observer = ObserverProcess(tmp_path_factory.mktemp("shared") / "state").wait_healthy()
    yield observer
    observer.close()


@pytest.fixture
def backend() -> Iterator[Backend]:
    made = Backend()
    yield made
    made.close()


def here(number: int, **changes: Any) -> Ledger:
    """A good stream of an engine on this host, now."""
    return numbered(number, **{"timings": timings(host_identity()), "wall_ns": time.time_ns(), **changes})


def test_a_request_is_counted_shown_and_complete_with_its_engine_spans(start: Start) -> None:
    observer = start().wait_healthy()
    assert observer.http.get("/readyz").status_code == 503
    link = WorkerLink(observer.settings.intake_socket)
    link.hello(engine=2)
    wait_until(lambda: observer.http.get("/readyz").status_code == 200, "ready once a worker reported")
    made = here(1, client_request_id="my-own", key_alias="k", team="t")
    link.send(*closing(made))
    for any_id in (made.request_id, "my-own", made.trace_id, f"00-{made.trace_id}-{made.span_id}-01"):
        (found,) = observer.find(any_id)
        assert found["request_id"] == made.request_id
    assert found["trace_complete"] is False
    assert found["ttft_ms"] == 81.5
    assert found["tpot_ms"] == 2.0
    assert found["e2e_ms"] == 186.0
    assert sum(found["stages"].values()) + found["unaccounted_ms"] == pytest.approx(81.5)
    assert abs(found["unaccounted_ms"]) < 0.001
    assert found["placement"] == "exact"
    assert found["engine"] == {"running": 3, "waiting": 1, "kv_usage": 0.25, "batch": 4}
    assert found["tokens"]["output"] == 51
    assert found["after"]["streaming"] == 103.5
    assert found["marks"]["first_token_written"] == 81.5
    assert found["marks"]["engine_scheduled"] == 30.5
    assert found["attempts"][0]["marks"]["request_sent"] == 9.0

    assert observer.post_spans(*engine_spans(made)).status_code == 200
    (found,) = observer.find(made.request_id, spans=1)
    assert found["trace_complete"] is True
    names = [span["name"] for span in found["spans"]]
    assert sorted(names) == sorted(
        [
            *("POST /v1/chat/completions", "auth", "receive", "route", "queue", "chat m-upstream", "relay"),
            *("llm_request", "queue", "prefill", "decode"),
        ]
    )
    parents = {span["span_id"] for span in found["spans"]}
    assert all(span["parent_id"] in parents or span["parent_id"] is None for span in found["spans"])

    route = '{model="m",surface="chat",upstream="engine"'
    assert observer.sample(f"gen_ai_server_time_to_first_token_seconds_count{route}}}") == 1
    assert observer.sample('tokenline_inflight_requests{upstream="engine"}') == 2
    assert observer.sample('tokenline_spans_received_total{result="accepted"}') == 4
    assert f'# {{trace_id="{made.trace_id}"}}' in observer.metrics(OPENMETRICS)
    assert observer.terminate() == 0
    (line,) = lines_of(observer.settings.state_dir / "access.log")
    assert (line["request_id"], line["key_alias"], line["outcome"]) == (made.request_id, "k", "ok")
    assert line["stages"]["engine_prefill"] == 45.0


def test_slow_lists_the_slowest_with_their_dominant_stage(shared: ObserverProcess) -> None:
    observer = shared
    link = WorkerLink(observer.settings.intake_socket)
    link.send(*(Closed(here(600 + number, model="slow-m", first_token_written=81.5 + number)) for number in range(5)))
    link.send(Closed(here(699, model="slow-m", first_token_written=500.0)))
    observer.find("req_699")
    found = observer.admin("/slow", window="15m", model="slow-m", limit=3).json()["requests"]
    assert [one["request_id"] for one in found] == ["req_699", "req_604", "req_603"]
    assert found[0]["dominant_stage"] == "relay"
    assert found[1]["dominant_stage"] == "engine_prefill"
    found = observer.admin("/slow", limit=1).json()["requests"]
    assert [one["request_id"] for one in found] == ["req_699"]
    answer = observer.admin("/slow", window="soon")
    assert answer.status_code == 422
    assert "like 90s, 15m, 1h, 7d" in answer.json()["error"]["message"]
    assert observer.admin("/slow", limit=0).status_code == 422


def test_the_admin_api_is_for_holders_of_the_admin_key(shared: ObserverProcess) -> None:
    observer = shared
    for path in ("/slow", "/requests/x", "/extra"):
        refused = observer.admin(path, key=None)
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"] == "Bearer"
        assert "admin key" in refused.json()["error"]["message"]
        assert observer.admin(path, key="sk-tl-wrong").status_code == 401
        assert observer.admin(path, key=ADMIN_KEY + "x").status_code == 401
    assert observer.admin("/extra").json() == {"from": "the caller"}
    answer = observer.http.get("/admin/v1/extra", headers={"x-api-key": ADMIN_KEY})
    assert answer.status_code == 200
    missing = observer.admin("/requests/req_nobody")
    assert missing.status_code == 404
    assert "req_nobody" in missing.json()["error"]["message"]
    assert "tracing.store_max_rows" in missing.json()["error"]["message"]
    assert "/metrics" in observer.http.get("/").json()["error"]["message"]


def test_a_connection_that_sends_garbage_is_closed_and_no_other_notices(shared: ObserverProcess) -> None:
    observer = shared
    good = WorkerLink(observer.settings.intake_socket)
    good.send(Closed(here(611)))
    for garbage in (b"\xff\xff\xff\xff", b"\x00\x00\x00\x04\xc1\xc1\xc1\xc1", b"\x00\x00\x00\x01\x01"):
        bad = WorkerLink(observer.settings.intake_socket)
        bad.send_raw(garbage)
        assert bad.is_closed()
        bad.close()
    good.send(Closed(here(612)))
    assert observer.find("req_612")
    assert observer.find("req_611")


def test_a_frame_cut_anywhere_is_put_together(shared: ObserverProcess) -> None:
    from tracing.wire import frame

    observer = shared
    link = WorkerLink(observer.settings.intake_socket)
    data = frame([Closed(here(621)), Closed(here(622))])
    for cut in (1, 3, 5, 100):
        link.send_raw(data[:cut])
        data = data[cut:]
        time.sleep(0.01)
    link.send_raw(data)
    assert observer.find("req_622")


def test_kept_traces_are_exported_each_span_once_with_ids_parents_and_resources(start: Start, backend: Backend) -> None:
    observer = start(environment={"OTEL_EXPORTER_OTLP_ENDPOINT": backend.url}).wait_healthy()
    link = WorkerLink(observer.settings.intake_socket)
    made = here(1, parent_span_id="00000000000000aa", tracestate="vendor=1")
    spans = engine_spans(made)
    observer.post_spans(*spans[1:3])  # children before their parent
    link.send(*closing(made))
    observer.find(made.request_id)
    observer.post_spans(*spans[:3])  # a retry of the exporter sends two of them again
    wait_until(lambda: len(backend.of(made.trace_id)) >= 10, "the trace was exported")
    observer.post_spans(spans[3])  # late, after the trace was complete
    wait_until(lambda: len(backend.of(made.trace_id)) >= 11, "the late span was exported")
    observer.find(made.request_id, spans=1)
    assert observer.terminate() == 0

    exported = backend.of(made.trace_id)
    assert len({span.span_id for span in exported}) == len(exported) == 11
    by_name = {(span.name, span.resource["service.name"]): span for span in exported}
    server = by_name["POST /v1/chat/completions", "tokenline-gateway"]
    attempt = by_name["chat m-upstream", "tokenline-gateway"]
    request = by_name["llm_request", "the-engine"]
    assert server.parent_id == "00000000000000aa"
    assert server.trace_state == "vendor=1"
    assert attempt.parent_id == server.span_id == made.span_id
    assert request.parent_id == attempt.span_id == made.attempts[0].span_id
    for child in ("queue", "prefill", "decode"):
        assert by_name[child, "the-engine"].parent_id == request.span_id
    for child in ("auth", "receive", "route", "queue", "relay"):
        assert by_name[child, "tokenline-gateway"].parent_id == server.span_id
    assert server.start_ns == made.wall_ns
    assert server.end_ns - server.start_ns == 186_000_000
    ops = [span for span in backend.spans if span.trace_id != made.trace_id]
    assert {span.name for span in ops} == {"GET /admin/v1/requests/{any_id}"}, "health and metrics make no spans"


def test_where_the_engine_sends_no_span_its_timings_are_exported_and_late_spans_are_not_added_to_them(
    start: Start, backend: Backend
) -> None:
    observer = start(
        environment={"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{backend.url}/v1/traces"}, tracing={"join_wait_ms": 300}
    ).wait_healthy()
    link = WorkerLink(observer.settings.intake_socket)
    made = here(1)
    link.send(*closing(made))
    wait_until(lambda: len(backend.of(made.trace_id)) >= 12, "the trace was exported")
    derived = [span for span in backend.of(made.trace_id) if span.attributes.get("tokenline.derived")]
    assert sorted(span.name for span in derived) == ["decode", "llm_request", "prefill", "queue", "tokenize"]
    assert observer.find(made.request_id)[0]["trace_complete"] is True
    observer.post_spans(*engine_spans(made))
    dropped = 'tokenline_traces_dropped_total{reason="late_spans_not_exported"}'
    wait_until(lambda: observer.sample(dropped) == 1, "the late spans were counted")
    stored = observer.find(made.request_id, spans=1)[0]["spans"]
    assert not [span for span in stored if span["attributes"].get("tokenline.derived")]
    assert [span["name"] for span in stored].count("llm_request") == 1
    assert observer.terminate() == 0
    assert len(backend.of(made.trace_id)) == 12


def test_spans_of_a_trace_that_was_stored_long_ago_are_added_and_of_nobodys_counted(
    start: Start, backend: Backend
) -> None:
    observer = start(
        environment={"OTEL_EXPORTER_OTLP_ENDPOINT": backend.url}, tracing={"join_wait_ms": 200}
    ).wait_healthy()
    link = WorkerLink(observer.settings.intake_socket)
    made = numbered(1, timings=None, wall_ns=time.time_ns())
    link.send(*closing(made))
    wait_until(lambda: observer.find(made.request_id)[0]["trace_complete"], "the wait is over")
    observer.post_spans(*engine_spans(made))
    observer.post_spans(*engine_spans(numbered(77)))
    dropped = 'tokenline_traces_dropped_total{reason="unknown_trace"}'
    wait_until(lambda: observer.sample(dropped) == 1, "the unknown trace was counted")
    names = [span["name"] for span in observer.find(made.request_id, spans=1)[0]["spans"]]
    assert names.count("llm_request") == 1
    wait_until(lambda: len(backend.of(made.trace_id)) >= 11, "the late spans were exported")
    assert observer.terminate() == 0
    exported = backend.of(made.trace_id)
    assert len({span.span_id for span in exported}) == len(exported) == 11
    assert backend.of(numbered(77).trace_id) == []


def test_traces_that_are_not_kept_are_findable_and_not_exported(start: Start, backend: Backend) -> None:
    observer = start(
        environment={"OTEL_EXPORTER_OTLP_ENDPOINT": backend.url}, tracing={"sample_ratio": 0.0}
    ).wait_healthy()
    link = WorkerLink(observer.settings.intake_socket)
    ordinary, failed = here(1), here(2, outcome=Outcome.UPSTREAM_ERROR, status=502, error_code="upstream_error")
    for made in (ordinary, failed):
        link.send(*closing(made))
        observer.find(made.request_id)
        observer.post_spans(*engine_spans(made))
    assert observer.find("req_1")[0]["kept"] is False
    assert observer.find("req_2")[0]["kept"] is True
    assert observer.sample("tokenline_traces_kept_total") == 1
    assert observer.terminate() == 0
    assert backend.of(ordinary.trace_id) == []
    assert len(backend.of(failed.trace_id)) == 11
    (server,) = (span for span in backend.of(failed.trace_id) if span.kind.value == "server" and "POST" in span.name)
    assert server.attributes["error.type"] == "upstream_error"


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


def test_a_backend_that_is_away_is_counted_and_does_not_keep_the_process(start: Start) -> None:
    with socket.socket() as frozen:
        frozen.bind(("127.0.0.1", 0))
        frozen.listen()
        environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{frozen.getsockname()[1]}",
            "OTEL_EXPORTER_OTLP_TIMEOUT": "1",
        }
        observer = start(environment=environment).wait_healthy()
        link = WorkerLink(observer.settings.intake_socket)
        link.send(Closed(here(1, attempts=[], timings=None)))
        assert observer.find("req_1")
        failed = 'tokenline_traces_dropped_total{reason="export_failed"}'
        wait_until(lambda: observer.sample(failed) is not None, "the failure was counted")
        link.send(Closed(here(2, attempts=[], timings=None)))
        assert observer.find("req_2")
        began = time.monotonic()
        assert observer.terminate() == 0
        assert time.monotonic() - began < 9


def test_killed_under_load_the_store_opens_again_whole(start: Start) -> None:
    stop = threading.Event()
    sent = [0]

    def load(path: Path) -> None:
        link = WorkerLink(path)
        try:
            while not stop.is_set():
                link.send(*(Closed(here(sent[0] + n)) for n in range(20)))
                sent[0] += 20
                time.sleep(0.01)
        except OSError:
            return
        finally:
            link.close()

    observer = start().wait_healthy()
    for _ in range(2):
        loader = threading.Thread(target=load, args=(observer.settings.intake_socket,))
        before = sent[0]
        loader.start()
        wait_until(lambda: sent[0] >= before + 300, "some load was sent")  # noqa: B023
        observer.kill()
        loader.join()
        assert observer.settings.intake_socket.exists(), "a killed process leaves its socket file"
        observer = start().wait_healthy()
        with sqlite3.connect(observer.settings.traces_path) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    link = WorkerLink(observer.settings.intake_socket)
    link.send(Closed(here(1_000_000)))
    assert observer.find("req_1000000")
    assert observer.find(f"req_{before // 2}"), "rows from before the kill are there"
    assert observer.terminate() == 0


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


def test_an_export_to_itself_is_refused_at_the_start(start: Start) -> None:
    port = free_port()
    observer = start(
        server={"otlp_port": port}, environment={"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://localhost:{port}"}
    )
    _, stderr = observer.process.communicate(timeout=20)
    assert observer.process.returncode == 1
    assert "own OTLP receiver" in stderr
    assert "Traceback" not in stderr


ENGINE_TEXT = (
    b"# HELP tokenline_engine_batch Batch.\n# TYPE tokenline_engine_batch counter\ntokenline_engine_batch_total 4.0\n"
)
ENGINE_OPENMETRICS = ENGINE_TEXT + b"# EOF\n"


def test_the_engines_page_is_part_of_ours_in_the_same_format(start: Start, tmp_path: Path) -> None:
    text_type = "text/plain; version=0.0.4"
    engine = FakeEngine(tmp_path / "state" / "run" / "engine.sock", {"/metrics": (text_type, ENGINE_TEXT)})
    try:
        nowhere = "http://127.0.0.1:9"  # a proxy for the way out is no way to a neighbour
        observer = start(environment={"HTTP_PROXY": nowhere, "http_proxy": nowhere}).wait_healthy()
        assert observer.metrics().endswith("tokenline_engine_batch_total 4.0\n")
        assert "# EOF" not in observer.metrics()
        # An engine that has only the text format is written anew.
        page = observer.metrics(OPENMETRICS)
        assert page.count("# EOF") == 1
        assert page.endswith("# EOF\n")
        assert "tokenline_engine_batch_total 4.0\n" in page
        assert OPENMETRICS in engine.accepts
        up = 'tokenline_upstream_up{upstream="engine"}'
        wait_until(lambda: observer.sample(up) == 1, "the engine is seen to be up")
    finally:
        engine.close()


def test_an_engine_with_openmetrics_is_appended_before_the_one_end(start: Start) -> None:
    observer = start().wait_healthy()
    engine = FakeEngine(observer.settings.engine_socket, {"/metrics": (OPENMETRICS, ENGINE_OPENMETRICS)})
    try:
        page = observer.metrics(OPENMETRICS)
        assert page.endswith("tokenline_engine_batch_total 4.0\n# EOF\n")
        assert page.count("# EOF") == 1
    finally:
        engine.close()


def test_a_frozen_engine_delays_the_page_by_half_a_second_and_nobody_else(start: Start) -> None:
    observer = start().wait_healthy()
    engine = FakeEngine(observer.settings.engine_socket, {}, frozen=True)
    try:
        link = WorkerLink(observer.settings.intake_socket)
        page: list[str] = []
        scrape = threading.Thread(target=lambda: page.append(observer.metrics()))
        began = time.monotonic()
        scrape.start()
        link.send(Closed(here(1)))
        assert observer.find("req_1")
        scrape.join()
        assert time.monotonic() - began < 2
        assert "tokenline_requests_total" in page[0]
    finally:
        engine.close()


def test_a_workers_losses_are_totals(shared: ObserverProcess) -> None:
    observer = shared
    link = WorkerLink(observer.settings.intake_socket)
    link.send(WorkerState(0, 4711, host_identity(), {}, 3), WorkerState(0, 4711, host_identity(), {}, 5))
    wait_until(lambda: observer.sample("tokenline_ledgers_dropped_total") == 5, "losses were counted")


def test_with_a_quiet_log_level_there_is_no_access_log(start: Start) -> None:
    observer = start(logging={"level": "warning"}).wait_healthy()
    link = WorkerLink(observer.settings.intake_socket)
    link.send(Closed(here(1)))
    observer.find("req_1")
    assert observer.terminate() == 0
    assert not (observer.settings.state_dir / "access.log").exists()


def test_ledger_defaults_are_of_this_host(shared: ObserverProcess) -> None:
    """A ledger whose engine ran elsewhere is centred, not subtracted."""
    observer = shared
    link = WorkerLink(observer.settings.intake_socket)
    link.send(Closed(ledger(request_id="req_631")))  # its engine's host is called `host`, which this is not
    (found,) = observer.find("req_631")
    assert found["placement"] == "centred"
    assert found["unaccounted_ms"] is None
    assert found["stages"]["transit"] == 6.0
