"""The observer as a process: frames and spans in, metrics and answers out."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from ledgers import ledger
from observer_rig import (
    ADMIN_KEY,
    FakeEngine,
    ObserverProcess,
    Start,
    WorkerLink,
    closing,
    engine_spans,
    here,
    lines_of,
    wait_until,
)

from tracing.clock import host_identity
from tracing.ledger import Closed, WorkerState, encode_record

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


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
    assert observer.admin("/slow", by="x").status_code == 422
    assert observer.admin("/slow", stage="no_such_stage").json()["requests"] == []
    by_key = observer.admin("/slow", by="ttft", outcome="ok").json()["requests"]
    assert by_key == observer.admin("/slow").json()["requests"]


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
    data = frame([encode_record(Closed(here(number))) for number in (621, 622)])
    for cut in (1, 3, 5, 100):
        link.send_raw(data[:cut])
        data = data[cut:]
        time.sleep(0.01)
    link.send_raw(data)
    assert observer.find("req_622")


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


def test_ledger_defaults_are_of_this_host(shared: ObserverProcess) -> None:
    """A ledger whose engine ran elsewhere is centred, not subtracted."""
    observer = shared
    link = WorkerLink(observer.settings.intake_socket)
    link.send(Closed(ledger(request_id="req_631")))  # its engine's host is called `host`, which this is not
    (found,) = observer.find("req_631")
    assert found["placement"] == "centred"
    assert found["unaccounted_ms"] is None
    assert found["stages"]["transit"] == 6.0
