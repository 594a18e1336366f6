"""How requests end: clients that leave, spans of every kind of end, and metrics that stay true."""

from __future__ import annotations

import asyncio
import logging
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from engine_harness import PARENT_ID, TRACE_ID, TRACEPARENT, Harness, chat, done, settle
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode

from backend_engine.core.messages import Gauges, Step
from backend_engine.metrics import BusyShare
from backend_engine.spans import OncePerMinute, otlp_exporter
from settings.schema import LoggingSettings
from tracing.clock import FakeClock

REQUEST_ID = "req_" + "1" * 24
HEADERS = {"traceparent": TRACEPARENT, "x-tokenline-request-id": REQUEST_ID}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_running", [False, True])
async def test_a_client_that_leaves_is_aborted_at_once(tmp_path: Path, stream: bool, is_running: bool) -> None:
    harness = Harness(tmp_path)
    call = harness.call(body=chat(stream=stream))
    submit = await harness.submitted(call)
    if is_running:
        harness.core.first(submit, b"a")
        await settle()
    asked = harness.clock.advance_ms(3)
    call.leave()
    await done(call)
    assert [(abort.request_id, abort.asked_ns) for abort in harness.core.aborts] == [(submit.request_id, asked)]
    harness.core.last_word(submit, harness.core.finished("abort", int(is_running)))
    assert harness.metric("request_success_total", finished_reason="abort") == 1


async def test_a_client_that_leaves_before_its_body_is_complete_never_reaches_the_core(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    call = harness.call(parts=[], headers=HEADERS)
    call.leave()
    await done(call)
    assert harness.core.sent == []
    assert call.messages == []
    assert harness.spans()["llm_request"].attributes["tokenline.outcome"] == "client_cancelled"


async def test_a_finished_request_is_not_aborted(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    call = harness.call(body=chat())
    submit = await harness.submitted(call)
    harness.core.first(submit, b"a", "length")
    await done(call)
    call.leave()
    await settle()
    assert harness.core.aborts == []


async def test_a_writer_that_is_cancelled_gives_its_slot_back(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    call = harness.call(body=chat(stream=True))
    submit = await harness.submitted(call)
    call.task.cancel()
    await asyncio.wait([call.task])
    assert [abort.request_id for abort in harness.core.aborts] == [submit.request_id]


# -- spans -----------------------------------------------------------------------------------------------------------


def ms(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.end_time - span.start_time) / 1e6


async def test_spans_have_the_times_of_the_marks(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    began = harness.clock.wall_ns()
    question = [{"role": "user", "content": "XYZZY"}]
    call = harness.call(
        body=chat(messages=question, stream=True, max_tokens=3, temperature=0.5, stop="PLUGH"), headers=HEADERS
    )
    submit = await harness.submitted(call)
    harness.core.first(submit, b"a", queue_ms=7, prefill_ms=30)
    harness.core.more(submit, b"b", step_ms=20)
    harness.core.more(submit, b"c", "length", 3)
    harness.clock.advance_ms(2)
    await done(call)
    spans = harness.spans()
    assert set(spans) == {"llm_request", "tokenize", "queue", "prefill", "decode", "detokenize"}
    root = spans["llm_request"]
    assert root.kind is SpanKind.SERVER
    assert root.parent is not None
    assert root.parent.is_remote
    assert (f"{root.context.trace_id:032x}", f"{root.parent.span_id:016x}") == (TRACE_ID, PARENT_ID)
    assert root.start_time == began
    assert [ms(spans[name]) for name in ("tokenize", "queue", "prefill", "decode")] == [0, 7, 30, 40]
    assert ms(spans["detokenize"]) == 2
    assert ms(root) == 79
    children = [span for name, span in spans.items() if name != "llm_request"]
    assert {span.parent.span_id for span in children if span.parent} == {root.context.span_id}
    assert root.resource.attributes == {
        "service.name": "tokenline-engine",
        "host.id": "host-1",
        "host.boot_id": "boot-1",
    }
    attributes = dict(root.attributes or {})
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "simulated",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.max_tokens": 3,
        "gen_ai.usage.input_tokens": 23,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.latency.time_in_queue": 0.007,
        "gen_ai.latency.time_in_model_prefill": 0.030,
        "gen_ai.latency.time_in_model_decode": 0.040,
        "gen_ai.latency.time_in_model_inference": 0.070,
        "gen_ai.latency.time_to_first_token": 0.037,
        "gen_ai.latency.e2e": 0.079,
        "tokenline.engine.running": 3,
        "tokenline.engine.waiting": 2,
        "tokenline.engine.kv_usage": 0.25,
        "tokenline.engine.batch_size": 4,
        "tokenline.outcome": "ok",
        "tokenline.request_id": REQUEST_ID,
    }
    assert {name: attributes.get(name) for name in expected} == expected
    assert "error.type" not in attributes
    assert dict(spans["decode"].attributes or {}) == {
        "tokenline.output_tokens": 3,
        "tokenline.decode_steps": 2,
        "tokenline.mean_batch": 4,
        "tokenline.token_gap_seconds": 0.0015,
    }
    told = str([span.to_json() for span in spans.values()])
    assert "XYZZY" not in told
    assert "PLUGH" not in told


@pytest.mark.parametrize("stage", ["queue", "prefill", "decode"])
async def test_an_aborted_request_has_the_spans_that_it_reached(tmp_path: Path, stage: str) -> None:
    harness = Harness(tmp_path)
    call = harness.call(body=chat(stream=True), headers=HEADERS)
    submit = await harness.submitted(call)
    scheduled_ns, tokens = None, 0
    if stage == "prefill":
        scheduled_ns = harness.clock.advance_ms(4)
    elif stage == "decode":
        harness.core.first(submit, b"a", queue_ms=4)
        harness.core.more(submit, b"b")
        await settle()
        tokens = 3
    harness.clock.advance_ms(10)
    call.leave()
    await done(call)
    assert harness.spans() == {}
    harness.clock.advance_ms(15)
    finished = harness.core.finished("abort", tokens, wasted_tokens=tokens and 1, scheduled_ns=scheduled_ns)
    harness.clock.advance_ms(1)
    harness.core.last_word(submit, finished)
    spans = harness.spans()
    reached = {"queue": ["queue"], "prefill": ["queue", "prefill"], "decode": ["queue", "prefill", "decode"]}[stage]
    assert set(spans) == {"llm_request", "tokenize", *reached}
    root = spans["llm_request"]
    attributes = dict(root.attributes or {})
    assert attributes["tokenline.outcome"] == attributes["error.type"] == "client_cancelled"
    assert attributes["tokenline.abort_propagation_seconds"] == pytest.approx(0.015)
    assert attributes["tokenline.wasted_tokens"] == (1 if tokens else 0)
    assert attributes["gen_ai.usage.output_tokens"] == tokens
    assert root.end_time == spans[reached[-1]].end_time
    assert ms(spans["queue"]) == {"queue": 25, "prefill": 4, "decode": 4}[stage]


async def test_a_refused_request_has_a_span_with_its_error(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    await done(harness.call(body=chat(max_tokens=-1), headers=HEADERS))
    spans = harness.spans()
    assert set(spans) == {"llm_request"}
    root = spans["llm_request"]
    attributes = dict(root.attributes or {})
    assert (attributes["error.type"], attributes["tokenline.outcome"]) == ("invalid_request", "client_error")
    assert attributes["http.response.status_code"] == 400
    assert root.status.status_code is StatusCode.ERROR


async def test_a_failed_request_has_spans_too(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    lost = harness.call(body=chat(stream=True), headers=HEADERS)
    submit = await harness.submitted(lost)
    harness.core.first(submit, b"a")
    await settle()
    harness.frontend.lose_core("gone")
    await done(lost)
    spans = harness.spans()
    assert set(spans) == {"llm_request", "tokenize", "queue", "prefill"}
    attributes = dict(spans["llm_request"].attributes or {})
    assert (attributes["error.type"], attributes["tokenline.outcome"]) == ("engine_unavailable", "upstream_error")


@pytest.mark.parametrize("traceparent", [None, "00-0-0-01", "ff" + TRACEPARENT[2:]])
async def test_without_a_valid_trace_context_there_are_no_spans(tmp_path: Path, traceparent: str | None) -> None:
    harness = Harness(tmp_path)
    call = harness.call(body=chat(), headers={"traceparent": traceparent} if traceparent else {})
    submit = await harness.submitted(call)
    harness.core.first(submit, b"a", "length")
    await done(call)
    assert harness.spans() == {}


def test_a_receiver_that_is_away_is_logged_once_a_minute() -> None:
    times = iter((0.0, 1.0, 59.9, 60.1, 100.0, 121.0))
    quiet = OncePerMinute(lambda: next(times))
    record = logging.LogRecord("x", logging.ERROR, "", 0, "away", None, None)
    assert [quiet.filter(record) for _ in range(6)] == [True, False, False, True, False, True]


@pytest.mark.parametrize("token", [None, "the-receivers"])
async def test_the_exporter_heeds_only_its_own_endpoint_and_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: str | None
) -> None:
    """OTEL_EXPORTER_OTLP_* are for the observer's backend; its credentials must not reach anybody else."""
    seen: list[tuple[str, dict[str, str]]] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            seen.append((self.path, {name.lower(): value for name, value in self.headers.items()}))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Quiet."""

    with HTTPServer(("127.0.0.1", 0), Receiver) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http_proxy"):
            monkeypatch.setenv(name, "http://127.0.0.1:9")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=secret,x-team=blue")
        harness = Harness(tmp_path, exporter=otlp_exporter(f"http://127.0.0.1:{server.server_port}/v1/traces", token))
        await done(harness.call(body=chat(max_tokens=-1), headers=HEADERS))
        await asyncio.to_thread(harness.span_writer.flush)
        server.shutdown()
    ((path, headers),) = seen
    assert path == "/v1/traces"
    assert headers["content-type"] == "application/x-protobuf"
    assert headers.get("authorization") == (f"Bearer {token}" if token else None)
    assert "x-team" not in headers


# -- metrics ---------------------------------------------------------------------------------------------------------


async def test_metrics_are_those_of_the_marks(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    call = harness.call(body=chat(max_tokens=3))
    submit = await harness.submitted(call)
    harness.core.first(submit, b"a", queue_ms=7, prefill_ms=30)
    harness.core.more(submit, b"b", step_ms=20)
    harness.core.more(submit, b"c", "length", 3)
    await done(call)
    sums = {
        "time_to_first_token_seconds": (0.037, 1),
        "request_queue_time_seconds": (0.007, 1),
        "request_prefill_time_seconds": (0.030, 1),
        "request_decode_time_seconds": (0.040, 1),
        "e2e_request_latency_seconds": (0.077, 1),
        "inter_token_latency_seconds": (0.040, 2),
    }
    for name, (total, count) in sums.items():
        assert harness.metric(f"{name}_sum") == pytest.approx(total), name
        assert harness.metric(f"{name}_count") == count, name
    assert harness.metric("prompt_tokens_total") == 20
    assert harness.metric("generation_tokens_total") == 3
    assert harness.metric("request_success_total", finished_reason="length") == 1
    assert harness.metric("detokenize_seconds_count") == 3


async def test_gauges_follow_the_core_when_everything_was_aborted(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    harness.core.say(gauges=Gauges(running=2, waiting=5, kv_used=30, kv_pages=100))
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_ratio")
    assert [harness.metric(name) for name in names] == [2, 5, 0.3]
    harness.core.say(gauges=Gauges(0, 0, 0, 100))
    assert [harness.metric(name) for name in names] == [0, 0, 0]


async def test_steps_are_counted(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    step = Step(batch=8, tokens=40, forward_ns=35_000_000, gap_ns=1_000_000, schedule_ns=200_000, slot_kernel_ns=0)
    first = Step(batch=8, tokens=40, forward_ns=35_000_000, gap_ns=None, schedule_ns=200_000, slot_kernel_ns=0)
    harness.core.say(steps=(first, step))
    assert harness.metric("forward_seconds_total") == pytest.approx(0.07)
    assert harness.metric("batch_size_sum") == 16
    assert harness.metric("batched_tokens_sum") == 80
    assert (harness.metric("token_gap_seconds_count"), harness.metric("token_gap_seconds_sum")) == (1, 0.001)
    assert harness.metric("schedule_seconds_sum") == pytest.approx(0.0004)
    assert harness.metric("slot_kernel_seconds_count") == 2
    assert harness.metric("busy_ratio") == pytest.approx(0.007)


async def test_totals_of_the_core_are_counted_once(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    for queries in (100, 100, 130):
        told = {"prefix_queries_total": queries, "prefix_hits_total": 40, "evictions_total": 2}
        harness.core.say(gauges=Gauges(0, 0, 0, 100, **told, preemptions_total=3, ooms_total=1))
    expected = {"queries": 130, "hits": 40, "evictions": 2}
    assert {name: harness.metric(f"prefix_cache_{name}_total") for name in expected} == expected
    assert (harness.metric("num_preemptions_total"), harness.metric("oom_total")) == (3, 1)


def test_the_busy_share_forgets_what_is_ten_seconds_old() -> None:
    clock = FakeClock()
    busy = BusyShare(clock)
    for _ in range(400):
        clock.advance_ms(50)
        busy.add(45_000_000)
    assert busy.share() == pytest.approx(0.9, abs=0.01)
    clock.advance_ms(5000)
    assert busy.share() == pytest.approx(0.45, abs=0.01)
    clock.advance_ms(5100)
    assert busy.share() == 0


async def test_the_page_is_prometheus_text_or_openmetrics(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    plain = harness.call("/metrics", method="GET")
    modern = harness.call("/metrics", method="GET", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    await done(plain, modern)
    assert plain.headers["content-type"].startswith("text/plain")
    assert modern.headers["content-type"].startswith("application/openmetrics-text")
    assert modern.body.endswith(b"# EOF\n")
    facts = 'async_scheduling="false",chunked_prefill="true",device="simulated",dtype="none",model="simulated"'
    assert f"tokenline_engine_info{{{facts}" in plain.body.decode()
    assert 'simulated="true"' in plain.body.decode()


async def test_the_line_of_rates_says_what_happened_since_the_last(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    harness = Harness(tmp_path, logging=LoggingSettings(log_tps=True, log_gpu_util=True))
    call = harness.call(body=chat())
    submit = await harness.submitted(call)
    step = Step(batch=1, tokens=1, forward_ns=20_000_000, gap_ns=2_000_000, schedule_ns=1, slot_kernel_ns=0)
    harness.core.first(submit, b"abcde")
    harness.core.say(steps=(step,), gauges=Gauges(1, 2, 25, 100))
    harness.clock.advance_ms(975)
    with caplog.at_level(logging.INFO, "backend_engine.metrics"):
        harness.frontend.metrics.log_rates()
        harness.clock.advance_ms(1000)
        harness.frontend.metrics.log_rates()
    first, second = (record.getMessage() for record in caplog.records)
    assert first == "5.0 tokens/s, 1 running, 2 waiting, KV 25 %, mean token gap 2.00 ms, device busy 0%"
    assert second.startswith("0.0 tokens/s")
    assert "mean token gap none" in second
    call.leave()
