"""The engine as users meet it: its process, its socket, real time, and ends of every kind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from engine_rig import EngineProcess, engine_settings, running, started, until
from otlp_rig import Backend, otlp_backend
from pydantic import SecretStr

from settings.schema import EngineSettings, SchedulerSettings, ServerSettings

TRACE_IDS = [f"{number:032x}" for number in range(1, 100)]
GATEWAY_ID = f"req_{7:024x}"
RUNNING = 'tokenline_engine_num_requests_running{model="simulated"}'
WAITING = 'tokenline_engine_num_requests_waiting{model="simulated"}'
KV_USAGE = 'tokenline_engine_kv_cache_usage_ratio{model="simulated"}'


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "simulated", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8} | fields


@pytest.fixture(scope="module")
def backend() -> Iterator[Backend]:
    with otlp_backend() as found:
        yield found


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, backend: Backend) -> Iterator[EngineProcess]:
    """Two slots; spans go to `backend`."""
    port = int(backend.url.rpartition(":")[2])
    settings = engine_settings(
        tmp_path_factory.mktemp("engine"),
        server=ServerSettings(otlp_port=port, max_body_bytes=2**20),
        scheduler=SchedulerSettings(max_num_seqs=2),
    )
    env = os.environ | {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9",
        "HTTP_PROXY": "http://127.0.0.1:9",
        "http_proxy": "http://127.0.0.1:9",
    }
    with running(settings, env=env) as found:
        yield found


async def test_times_are_the_known_truth(engine: EngineProcess) -> None:
    """forward_ms 20, prefill_token_us 10: seen by the client, by the marks, and by the metrics alike."""
    client_ttfts, engine_ttfts, tpots, ratios = [], [], [], []
    async with engine.async_client() as client:
        for letter in "abcde":  # prompts of one length that begin apart, so that none is in the prefix cache
            start = time.perf_counter_ns()
            arrivals, events = [], []
            body = chat(stream=True, max_tokens=20, messages=[{"role": "user", "content": f"{letter}i"}])
            async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        arrivals.append(time.perf_counter_ns())
                        events.append(json.loads(line[6:]))
            assert len(events) == 20
            timings = events[-1]["timings"]
            marks = timings["marks"]
            order = ["received", "queued", "scheduled", "prefill_end", "first_written", "last_token"]
            assert start < marks["received"]
            assert [marks[name] for name in order] == sorted(marks[name] for name in order)
            assert marks["first_written"] < arrivals[0]
            spent = timings["queue_ms"] + timings["prompt_ms"] + timings["predicted_ms"]
            assert spent == pytest.approx((marks["last_token"] - marks["queued"]) / 1e6)
            assert timings["prompt_ms"] == pytest.approx(20.2, abs=0.01)
            client_ttfts.append((arrivals[0] - start) / 1e6)
            engine_ttfts.append((marks["first_written"] - marks["received"]) / 1e6)
            tpots.append((arrivals[-1] - arrivals[0]) / 19 / 1e6)
            ratios.append(tpots[-1] / timings["predicted_per_token_ms"])
    assert min(client_ttfts) == pytest.approx(20.2, abs=5)  # the least: other processes only ever add to it
    assert min(engine_ttfts) == pytest.approx(20.2, abs=5)
    assert statistics.median(tpots) == pytest.approx(20, abs=5)
    assert statistics.median(ratios) == pytest.approx(1, abs=0.02)


def test_the_openai_package_streams_and_asks(engine: EngineProcess) -> None:
    client = openai.OpenAI(base_url="http://engine/v1", api_key="none", http_client=engine.client())
    stream = client.chat.completions.create(**chat(stream=True, stream_options={"include_usage": True}))
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert len(text) == 8
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 8
    whole = client.chat.completions.create(**chat(temperature=0, seed=1))
    again = client.chat.completions.create(**chat(temperature=0, seed=1))
    assert whole.choices[0].message.content == again.choices[0].message.content
    assert client.completions.create(model="simulated", prompt="x", max_tokens=3).choices[0].finish_reason == "length"
    assert [model.id for model in client.models.list()] == ["simulated"]
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.chat.completions.create(**chat(max_tokens=-1))
    with pytest.raises(openai.NotFoundError, match="gpt-4o"):
        client.chat.completions.create(**chat(model="gpt-4o"))


def test_a_body_of_50_mb_is_refused_and_the_refusal_is_read(engine: EngineProcess) -> None:
    body = b'{"model":"' + b"x" * 50_000_000 + b'"}'
    with engine.client() as client:
        refused = client.post("/v1/chat/completions", content=body)
        pieces = iter([body[at : at + 2**16] for at in range(0, 2**24, 2**16)])
        chunked = client.post("/v1/chat/completions", content=pieces)
        assert client.get("/health").status_code == 200
    for answer in (refused, chunked):
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


@pytest.mark.parametrize("moment", ["queued", "streaming", "whole"])
async def test_a_client_that_leaves_frees_its_slot_within_the_steps_under_way(
    engine: EngineProcess, backend: Backend, moment: str
) -> None:
    trace_id = TRACE_IDS[{"queued": 0, "streaming": 1, "whole": 2}[moment]]
    headers = {"traceparent": f"00-{trace_id}-00000000000000ab-01"}
    async with engine.async_client() as client:
        in_both_slots = 2 if moment == "queued" else 0
        streams = [await read_some(client, max_tokens=2000) for _ in range(in_both_slots)]
        request = client.build_request(
            "POST", "/v1/chat/completions", json=chat(stream=moment == "streaming", max_tokens=2000), headers=headers
        )
        if moment == "streaming":
            answer = await client.send(request, stream=True)
            await anext(answer.aiter_lines())
            await answer.aclose()
        else:
            sending = asyncio.create_task(client.send(request))
            gauge = WAITING if moment == "queued" else RUNNING
            await asyncio.to_thread(until, lambda: engine.metrics()[gauge] == 1, "the core has the request")
            sending.cancel()
            await asyncio.wait([sending])
        for stream, _lines in streams:
            await stream.aclose()
    found = await asyncio.to_thread(backend.trace, trace_id, "llm_request")
    spans = {received.span.name: received for received in found}
    root = spans["llm_request"]
    assert root.service == "tokenline-engine"
    assert root.attributes["tokenline.outcome"] == "client_cancelled"
    # of the pipeline's two steps, one runs and the next is planned: they end before slot and pages are given back
    assert 0 <= root.attributes["tokenline.abort_propagation_seconds"] < 0.055
    assert root.attributes["tokenline.wasted_tokens"] <= 2
    assert set(spans) - {"decode", "prefill"} == {"llm_request", "tokenize", "queue"}
    assert ("decode" in spans) is (moment != "queued")
    await asyncio.to_thread(
        until, lambda: [engine.metrics()[name] for name in (RUNNING, WAITING, KV_USAGE)] == [0, 0, 0], "all is free"
    )


async def test_spans_of_an_answer_reach_the_receiver_within_half_a_second(
    engine: EngineProcess, backend: Backend
) -> None:
    trace_id = TRACE_IDS[10]
    async with engine.async_client() as client:
        headers = {"traceparent": f"00-{trace_id}-00000000000000ab-01", "x-tokenline-request-id": GATEWAY_ID}
        answer = await client.post("/v1/chat/completions", json=chat(), headers=headers)
    ended = time.monotonic()
    while not any(received.span.trace_id.hex() == trace_id for received in backend.spans):
        assert time.monotonic() - ended < 1.0
        await asyncio.sleep(0.01)
    assert time.monotonic() - ended < 0.6
    spans = {received.span.name: received for received in backend.trace(trace_id, "llm_request", 5)}
    assert set(spans) == {"llm_request", "tokenize", "queue", "prefill", "decode", "detokenize"}
    root = spans["llm_request"]
    assert root.span.parent_span_id.hex() == "00000000000000ab"
    assert {spans[name].span.parent_span_id for name in spans if name != "llm_request"} == {root.span.span_id}
    assert root.attributes["tokenline.request_id"] == answer.headers["x-request-id"] == GATEWAY_ID
    timings = answer.json()["timings"]
    prefill = spans["prefill"].span
    assert (prefill.end_time_unix_nano - prefill.start_time_unix_nano) / 1e6 == pytest.approx(timings["prompt_ms"])


async def test_requests_at_once_share_a_batch(engine: EngineProcess) -> None:
    before = engine.metrics()
    async with engine.async_client() as client:
        answers = await asyncio.gather(
            *(client.post("/v1/chat/completions", json=chat(max_tokens=10)) for _ in range(4))
        )
    assert [answer.status_code for answer in answers] == [200] * 4
    after = engine.metrics()
    full = 'tokenline_engine_batch_size_bucket{le="2.0",model="simulated"}'
    alone = 'tokenline_engine_batch_size_bucket{le="1.0",model="simulated"}'
    assert (after[full] - before[full]) - (after[alone] - before[alone]) >= 15


# -- ends ------------------------------------------------------------------------------------------------------------


async def read_some(client: httpx.AsyncClient, **fields: Any) -> tuple[httpx.Response, Any]:
    """A stream whose first event has come, and its lines."""
    request = client.build_request("POST", "/v1/chat/completions", json=chat(stream=True, **fields))
    answer = await client.send(request, stream=True)
    lines = answer.aiter_lines()
    assert (await anext(lines)).startswith("data: {")
    return answer, lines


async def test_when_the_core_is_killed_streams_are_told_and_the_process_fails(tmp_path: Path) -> None:
    with running(engine_settings(tmp_path)) as engine:
        core = engine.core()
        async with engine.async_client() as client:
            answer, lines = await read_some(client, max_tokens=5000)
            whole = asyncio.create_task(client.post("/v1/chat/completions", json=chat(max_tokens=5000)))
            await asyncio.to_thread(until, lambda: engine.metrics()[RUNNING] == 2, "both run")
            core.send_signal(signal.SIGKILL)
            rest = [line async for line in lines if line]
            await answer.aclose()
            failed = await whole
        assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "engine_unavailable"
        assert (failed.status_code, failed.json()["error"]["code"]) == (503, "engine_unavailable")
        assert failed.headers["retry-after"] == "2"
        assert await asyncio.to_thread(engine.ended) == 1
        assert "tokenline engine: the engine's core ended unexpectedly (exit status -9)" in engine.output()
        assert "Traceback" not in engine.output()


async def test_sigterm_lets_running_answers_end_and_leaves_nothing(tmp_path: Path) -> None:
    with running(engine_settings(tmp_path)) as engine:
        core = engine.core()
        async with engine.async_client() as client:
            answer, lines = await read_some(client, max_tokens=30)
            engine.process.send_signal(signal.SIGTERM)
            rest = [line async for line in lines if line]
            await answer.aclose()
        assert rest[-1] == "data: [DONE]"
        assert await asyncio.to_thread(engine.ended) == 0
        assert not core.is_running()
        assert list(engine.settings.run_dir.iterdir()) == []
        assert "Traceback" not in engine.output()


async def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    settings = engine_settings(tmp_path, server=ServerSettings(drain_seconds=60))
    with running(settings) as engine:
        core = engine.core()
        async with engine.async_client() as client:
            answer, lines = await read_some(client, max_tokens=5000)
            engine.process.send_signal(signal.SIGINT)
            await asyncio.sleep(0.3)
            assert engine.process.poll() is None
            engine.process.send_signal(signal.SIGINT)
            rest = [line async for line in lines if line]
            await answer.aclose()
        assert "engine_unavailable" in rest[-1]
        assert await asyncio.to_thread(engine.ended) == 0
        assert not core.is_running()


def test_a_frontend_that_is_killed_takes_its_core_along_and_the_next_one_starts_clean(tmp_path: Path) -> None:
    settings = engine_settings(tmp_path)
    with running(settings) as engine:
        core = engine.core()
        engine.process.kill()
        engine.ended()
        until(lambda: not core.is_running() or core.status() == psutil.STATUS_ZOMBIE, "the core ends too")
    assert settings.engine_socket.exists()
    with running(settings) as engine, engine.client() as client:
        assert client.post("/v1/chat/completions", json=chat()).status_code == 200
        names = {path.name for path in settings.run_dir.iterdir()}
        assert names == {"engine.sock", f"engine-{engine.process.pid}"}


def test_a_core_that_cannot_serve_is_explained(tmp_path: Path) -> None:
    settings = engine_settings(tmp_path, scheduler=SchedulerSettings(max_num_seqs=64, max_num_batched_tokens=8))
    with started(settings) as engine:
        assert engine.ended() == 1
    last = engine.output().strip().splitlines()[-1]
    assert last.startswith("tokenline engine: ")
    assert "scheduler.max_num_batched_tokens" in last
    assert "Traceback" not in engine.output()


def test_what_is_in_the_way_of_listening_is_named(tmp_path: Path, free_port: int) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port))
        taken.listen()
        settings = engine_settings(tmp_path, server=ServerSettings(port=free_port))
        with started(settings, is_alone=True) as engine:
            assert engine.ended() == 1
    assert f"127.0.0.1:{free_port}" in engine.output()
    assert "server.port" in engine.output()
    long = engine_settings(tmp_path / ("x" * 100))
    with started(long) as engine:
        assert engine.ended() == 1
    assert "TOKENLINE_STATE_DIR" in engine.output()


def test_two_engines_do_not_share_a_socket(engine: EngineProcess) -> None:
    with started(engine.settings) as second:
        assert second.ended() == 1
    assert "another engine listens" in second.output()
    assert engine.is_ready()


@pytest.mark.parametrize("prefix", ["/api", "/api/v1", "/v1"])
def test_alone_it_serves_every_prefix_with_its_key(alone: EngineProcess, prefix: str) -> None:
    client = openai.OpenAI(base_url=alone.base_url + prefix, api_key="secret-key", max_retries=0)
    answer = client.chat.completions.with_raw_response.create(**chat(max_tokens=2))
    assert answer.headers["x-request-id"].startswith("req_")
    assert answer.parse().usage.completion_tokens == 2
    with pytest.raises(openai.AuthenticationError, match="not this engine's key"):
        client.with_options(api_key="wrong").models.list()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = engine_settings(
        tmp_path_factory.mktemp("alone"),
        forward_ms=1,
        engine=EngineSettings(device="simulated"),
        server=ServerSettings(port=port, api_key=SecretStr("secret-key"), otlp_port=9),
    )
    with running(settings, is_alone=True) as found:
        yield found
    assert "secret-key" not in found.output()
