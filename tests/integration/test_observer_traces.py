"""The observer exports kept traces: each span once, with the ids, parents and resources that it came with."""

from __future__ import annotations

import socket
import time

from ledgers import numbered
from observer_rig import (
    Backend,
    Start,
    WorkerLink,
    closing,
    engine_spans,
    free_port,
    here,
    wait_until,
)

from tracing.ledger import Closed, Outcome


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
        environment={"OTEL_EXPORTER_OTLP_ENDPOINT": backend.url}, tracing={"sample_ratio": 0.0, "keep_slowest": 0}
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


def test_an_export_to_itself_is_refused_at_the_start(start: Start) -> None:
    port = free_port()
    observer = start(
        server={"otlp_port": port}, environment={"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://localhost:{port}"}
    )
    _, stderr = observer.process.communicate(timeout=20)
    assert observer.process.returncode == 1
    assert "own OTLP receiver" in stderr
    assert "Traceback" not in stderr


def test_the_receiver_of_a_running_observer_asks_for_its_token(start: Start) -> None:
    observer = start(server={"otlp_token": "the-token"}).wait_healthy()
    answer = observer.post_spans(*engine_spans(here(1)))
    assert answer.status_code == 401
    assert observer.sample('tokenline_spans_received_total{result="accepted"}') is None
    assert observer.terminate() == 0


def test_a_vllm_shaped_upstream_is_joined_by_its_exported_span_alone(start: Start) -> None:
    observer = start().wait_healthy()
    link = WorkerLink(observer.settings.intake_socket)
    made = here(1, timings=None)
    (request, *_) = engine_spans(made)
    for name, seconds in (("time_in_queue", 0.018), ("time_in_model_prefill", 0.045), ("time_to_first_token", 0.065)):
        request.attributes.add(key=f"gen_ai.latency.{name}").value.double_value = seconds
    request.end_time_unix_nano = request.start_time_unix_nano + 170_000_000
    link.send(*closing(made))
    observer.post_spans(request)
    observer.post_spans(request)
    wait_until(lambda: observer.find("req_1")[0]["trace_complete"], "the span was joined")
    (found,) = observer.find("req_1", spans=1)
    assert found["stages"]["engine_queue"] == 18.0
    assert found["stages"]["engine_prefill"] == 45.0
    assert "upstream_wait" not in found["stages"]
    assert found["sources"]["engine_prefill"] == "span"
    assert found["sources"]["transit"] == "derived"
    assert found["engine_ttft_ms"] == 65.0
    derived = [span for span in found["spans"] if span["attributes"].get("tokenline.derived")]
    assert [span["name"] for span in derived] == ["queue", "prefill"]
    emitted = next(span for span in found["spans"] if span["name"] == "llm_request")
    assert all(emitted["start_ns"] <= s["start_ns"] <= s["end_ns"] <= emitted["end_ns"] for s in derived)
    series = 'tokenline_stage_duration_seconds_count{stage="%s",upstream="engine"}'
    assert observer.sample(series % "engine_prefill") == 1
    assert observer.sample(series % "upstream_wait") is None
