"""The relay between a scripted upstream and a real client: bytes, marks, errors, and clients that leave."""

import asyncio
import json
from pathlib import Path

import httpx
import pytest
from aiohttp import web
from gateway_rig import ANSWER, DONE, KEY, USAGE_EVENT, chunk, event, rig, stream, whole

from tracing.ledger import Outcome


async def test_a_stream_reaches_the_client_byte_for_byte_and_every_mark_is_in_order(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        events = [chunk("he"), 0.05, chunk("llo"), chunk(finish="stop"), DONE]
        r.upstream.script = stream(*events)
        answer = await r.chat(stream=True)
        assert answer.content == b"".join(e for e in events if isinstance(e, bytes))
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["cache-control"] == "no-cache"
        assert answer.headers["x-accel-buffering"] == "no"
        assert answer.headers["x-tokenline-upstream"] == "a"
        assert "auth;dur=" in answer.headers["server-timing"]
        ledger = await r.ledger()
        attempt = ledger.attempts[0]
        marks = [
            ledger.ingress, ledger.authenticated, ledger.body_read, ledger.routed, ledger.admitted,
            attempt.connect_start, attempt.connected, attempt.request_sent, attempt.upstream_headers,
            attempt.upstream_first_byte, ledger.first_event, ledger.first_token_written, ledger.last_token,
            ledger.upstream_end, ledger.finish,
        ]  # fmt: skip
        assert all(marks)
        assert marks == sorted(marks)
        assert ledger.last_token - ledger.first_token > 40e6
        assert (ledger.outcome, ledger.finish_reason, ledger.token_events) == (Outcome.OK, "stop", 2)
        (first,) = r.observer.first_tokens()
        assert first.ttft_ns == ledger.first_token_written - ledger.ingress


async def test_usage_is_asked_for_read_and_kept_from_a_client_that_did_not_ask(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        r.upstream.script = stream(chunk("hi"), chunk(finish="stop"), USAGE_EVENT, USAGE_EVENT, DONE)
        answer = await r.chat(stream=True)
        assert USAGE_EVENT not in answer.content
        assert json.loads(r.upstream.bodies[0])["stream_options"] == {"include_usage": True}
        ledger = await r.ledger()
        assert (ledger.usage.input_tokens, ledger.usage.output_tokens, ledger.usage.source) == (5, 2, "usage")


async def test_exactly_one_usage_event_reaches_a_client_that_asked(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        r.upstream.script = stream(chunk("hi"), chunk(finish="stop"), USAGE_EVENT, USAGE_EVENT, DONE)
        answer = await r.chat(stream=True, stream_options={"include_usage": True})
        assert answer.content.count(b'"usage"') == 1
        assert answer.content.endswith(USAGE_EVENT + DONE)


async def test_without_usage_token_events_are_counted_and_said_to_be(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        r.upstream.script = stream(chunk(""), chunk("a"), chunk("b"), chunk("c"), chunk(finish="stop"), DONE)
        await r.chat(stream=True)
        usage = (await r.ledger()).usage
        assert (usage.output_tokens, usage.source) == (3, "events")


async def test_a_role_only_event_is_the_first_event_but_not_the_first_token(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        role = event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        reasoning = event({"choices": [{"index": 0, "delta": {"reasoning_content": "hm"}}]})
        r.upstream.script = stream(role, 0.05, reasoning, 0.05, chunk("x"), chunk(finish="stop"), DONE)
        await r.chat(stream=True)
        ledger = await r.ledger()
        assert ledger.first_token - ledger.first_event > 40e6
        assert ledger.first_visible - ledger.first_token > 40e6


async def test_timings_are_read_and_stripped_unless_the_client_asks(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        timed = chunk("x", timings={"prompt_ms": 12.5, "queue_ms": 1.0, "foreign": [1]})
        r.upstream.script = stream(timed, chunk(finish="stop"), DONE)
        answer = await r.chat(stream=True)
        assert b"timings" not in answer.content
        assert answer.headers["server-timing"].startswith("engine_queue;dur=1.000, engine_prefill;dur=12.500, auth;")
        ledger = await r.ledger()
        assert ledger.timings is not None
        assert ledger.timings.prompt_ms == 12.5
        r.client.headers["x-tokenline-timings"] = "include"
        assert timed in (await r.chat(stream=True)).content


async def test_a_whole_answer_passes_through_with_its_counts(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        r.upstream.script = whole(ANSWER | {"timings": {"prompt_ms": 3.0}})
        answer = await r.chat()
        assert answer.json() == ANSWER
        assert "engine_prefill;dur=3.000" in answer.headers["server-timing"]
        ledger = await r.ledger()
        assert (ledger.status, ledger.outcome, ledger.finish_reason) == (200, Outcome.OK, "stop")
        assert ledger.usage.output_tokens == 2
        assert ledger.timings is not None
        assert not ledger.first_token_written
        assert ledger.upstream_end <= ledger.finish


async def test_bytes_that_need_no_change_are_forwarded_as_they_came(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        body = b'{"model" : "m",  "messages":[], "x": 1.50, "y":1e400, "z":"\\u00e9"}'
        await r.client.post("/v1/chat/completions", content=body)
        assert r.upstream.bodies == [body]
        aliased = b'{"model":"alias","big":12345678901234567890123,"f":1.0}'
        await r.client.post("/v1/chat/completions", content=aliased)
        assert r.upstream.bodies[1] == aliased.replace(b'"alias"', b'"real-name"')


@pytest.mark.parametrize("prefix", ["/api", "/api/v1", "/v1", "/v1/v1", "/api/v1/v1"])
async def test_every_prefix_answers_and_a_doubled_one_gets_a_hint(tmp_path: Path, prefix: str) -> None:
    async with rig(tmp_path) as r:
        r.upstream.script = whole(ANSWER)
        answer = await r.client.post(prefix + "/chat/completions", json={"model": "m", "messages": []})
        assert answer.json() == ANSWER
        assert ("x-tokenline-hint" in answer.headers) == prefix.endswith("/v1/v1")
        models = (await r.client.get(prefix + "/models")).json()
        assert [model["id"] for model in models["data"]] == ["m", "alias"]


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/api/v1/chat/completions", b"{", 400, "invalid_json"),
        ("/api/v1/chat/completions", b"", 400, "invalid_json"),
        ("/api/v1/chat/completions", b"[]", 400, "invalid_json"),
        ("/api/v1/chat/completions", b'{"model":"m","x":"\xff"}', 400, "invalid_json"),
        ("/api/v1/chat/completions", b"[" * 100_000, 400, "invalid_json"),
        ("/api/v1/chat/completions", b'{"messages":[]}', 400, "invalid_request"),
        ("/api/v1/chat/completions", b'{"model":3}', 400, "invalid_request"),
        ("/api/v1/chat/completions", b'{"model":"m","stream":"yes"}', 400, "invalid_request"),
        ("/api/v1/chat/completions", b'{"model":"m","n":0}', 400, "invalid_request"),
        ("/api/v1/chat/completions", b'{"model":"mm"}', 404, "model_not_found"),
        ("/api/v1/chat/completions", b" " * 3000, 413, "body_too_large"),
        ("/api/v1/chat/completions/chat/completions", b"{}", 404, "wrong_base_url"),
        ("/openai/v1/chat/completions", b"{}", 404, "wrong_base_url"),
        ("/", b"{}", 404, "wrong_base_url"),
        ("/api/v1/embeddings", b"{}", 400, "invalid_request"),
        ("/api/v1/models", b"{}", 405, "method_not_allowed"),
    ],
)
async def test_each_slip_has_its_own_error(tmp_path: Path, path: str, body: bytes, status: int, code: str) -> None:
    async with rig(tmp_path, server={"max_body_bytes": 200_000 if len(body) > 3000 else 2000}) as r:
        answer = await r.client.post(path, content=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (status, code)
        assert error["request_id"] == answer.headers["x-request-id"]
        ledger = await r.ledger()
        assert ledger.outcome is (Outcome.CLIENT_ERROR if status < 500 else Outcome.UPSTREAM_ERROR)
        assert not ledger.attempts


async def test_a_stranger_gets_401_and_the_body_is_not_read(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        answer = await r.client.post("/api/chat/completions", content=b"{", headers={"authorization": "Bearer nope"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "unknown_key")
        assert answer.headers["www-authenticate"] == "Bearer"
        ledger = await r.ledger()
        assert (ledger.outcome, ledger.authenticated, ledger.body_read) == (Outcome.AUTH_ERROR, 0, 0)


async def test_an_endless_upload_is_cut_at_the_limit(tmp_path: Path) -> None:
    async with rig(tmp_path, server={"max_body_bytes": 10_000}) as r:

        async def endless():
            for _ in range(50):
                yield b"x" * 1000

        answer = await r.client.post("/api/chat/completions", content=endless())
        assert answer.status_code == 413


async def test_over_the_limit_a_request_is_refused_at_once(tmp_path: Path) -> None:
    async with rig(tmp_path, server={"max_concurrent_requests": 1}) as r:
        r.upstream.script = stream(chunk("a"), 30.0)
        async with r.client.stream("POST", "/v1/chat/completions", json={"model": "m", "stream": True}) as running:
            assert running.status_code == 200
            refused = await r.chat()
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
            assert refused.headers["retry-after"] == "1"
        ledgers = await r.observer.closed(2)
        assert ledgers[0].outcome is Outcome.QUEUE_REJECTED
        r.upstream.script = whole(ANSWER)
        assert (await r.chat()).status_code == 200


@pytest.mark.parametrize("case", ["before the first token", "in the stream", "on a whole answer"])
async def test_a_client_that_leaves_closes_the_upstream_at_once(tmp_path: Path, case: str) -> None:
    async with rig(tmp_path) as r:
        streaming = case != "on a whole answer"
        r.upstream.script = stream(chunk("a"), 30.0) if case == "in the stream" else stream(30.0)
        reader, writer = await asyncio.open_connection("127.0.0.1", r.settings.server.port)
        body = json.dumps({"model": "m", "stream": streaming}).encode()
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %s\r\ncontent-length: %d\r\n\r\n%s"
            % (KEY.encode(), len(body), body)
        )
        await r.upstream.asked.wait()
        if case == "in the stream":
            await reader.readuntil(b'"a"')
        writer.close()
        async with asyncio.timeout(2):
            await r.upstream.cancelled.wait()
        ledger = await r.ledger()
        assert ledger.outcome is Outcome.CLIENT_CANCELLED
        assert ledger.client_gone
        assert ledger.attempts[0].error == "cancelled"
        assert r.worker._state(0).inflight == {"a": 0}


async def test_a_dead_upstream_is_passed_over_and_both_attempts_have_clocks_of_their_own(tmp_path: Path) -> None:
    async with rig(tmp_path, dead=("gone",)) as r:
        r.upstream.script = stream(chunk("a"), chunk(finish="stop"), DONE)
        answer = await r.chat(stream=True)
        assert answer.headers["x-tokenline-upstream"] == "a"
        first, second = (await r.ledger()).attempts
        assert (first.upstream, first.error, first.connected) == ("gone", "connect", 0)
        assert first.end <= second.connect_start < second.request_sent


@pytest.mark.parametrize(
    ("script", "status"),
    [
        (stream(event({"error": {"message": "out of memory", "code": "oom"}})), 200),
        (whole({"error": {"message": "x"}}, status=500), 500),
    ],
)
async def test_a_failing_upstream_is_passed_over_before_the_first_event(tmp_path: Path, script, status: int) -> None:
    async with rig(tmp_path, names=("a", "b")) as r:
        r.upstreams["a"].script = script
        r.upstreams["b"].script = stream(chunk("b"), chunk(finish="stop"), DONE)
        assert b'"b"' in (await r.chat(stream=True)).content
        assert [a.status for a in (await r.ledger()).attempts] == [status, 200]


async def test_a_client_error_of_the_upstream_goes_to_the_client_unchanged_and_is_not_retried(tmp_path: Path) -> None:
    async with rig(tmp_path, names=("a", "b")) as r:
        told = {"error": {"message": "temperature must be at most 2", "type": "invalid_request_error", "param": "t"}}
        r.upstream.script = whole(told, status=400)
        answer = await r.chat()
        assert (answer.status_code, answer.json()) == (400, told)
        ledger = await r.ledger()
        assert (ledger.outcome, len(ledger.attempts)) == (Outcome.CLIENT_ERROR, 1)


@pytest.mark.parametrize(
    ("script", "status", "code"),
    [
        (whole({"error": {"message": "no", "code": "x"}}, status=401), 502, "upstream_error"),
        (whole({"error": {"message": "out", "code": "engine_out_of_memory"}}, status=503), 503, "engine_out_of_memory"),
        (stream(), 502, "upstream_error"),
        (stream(b": ping\n\n"), 502, "upstream_error"),
    ],
)
async def test_upstream_failures_are_told_in_our_words(tmp_path: Path, script, status: int, code: str) -> None:
    async with rig(tmp_path) as r:
        r.upstream.script = script
        answer = await r.chat(stream=True)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
        assert (await r.ledger()).outcome is Outcome.UPSTREAM_ERROR


async def test_html_instead_of_an_answer_is_an_error(tmp_path: Path) -> None:
    async def page(request: web.Request) -> web.StreamResponse:
        return web.Response(text="<html>login</html>", content_type="text/html")

    async with rig(tmp_path) as r:
        r.upstream.script = page
        answer = await r.chat(stream=True)
        assert answer.status_code == 502
        assert "text/html" in answer.json()["error"]["message"]


async def test_a_stream_that_breaks_off_ends_in_one_error_event(tmp_path: Path) -> None:
    async def breaks(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(chunk("a"))
        assert request.transport is not None
        request.transport.abort()
        return response

    async with rig(tmp_path) as r:
        r.upstream.script = breaks
        answer = await r.chat(stream=True)
        assert answer.status_code == 200
        events = answer.content.strip().split(b"\n\n")
        assert len(events) == 2
        assert json.loads(events[1].removeprefix(b"data: "))["error"]["code"] == "upstream_error"
        ledger = await r.ledger()
        assert (ledger.outcome, ledger.status) == (Outcome.UPSTREAM_ERROR, 200)


@pytest.mark.parametrize(
    ("limits", "script", "phase"),
    [
        ({"first_byte_timeout_seconds": 0.2}, stream(5.0), "idle"),
        ({"idle_timeout_seconds": 0.2}, stream(chunk("a"), 5.0), "idle"),
        ({"request_timeout_seconds": 0.3}, stream(chunk("a"), 5.0), "total"),
    ],
)
async def test_each_time_limit_is_named_when_it_strikes(tmp_path: Path, limits, script, phase: str) -> None:
    async def silent(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(5)
        return web.Response()

    async with rig(tmp_path, server=limits) as r:
        first_byte = "first_byte_timeout_seconds" in limits
        r.upstream.script = silent if first_byte else script
        answer = await r.chat(stream=True)
        setting = next(iter(limits))
        assert f"server.{setting}" in answer.text
        assert (answer.status_code == 504) == first_byte
        ledger = await r.ledger()
        assert ledger.outcome is Outcome.UPSTREAM_TIMEOUT
        assert ledger.attempts[0].error == ("first_byte" if first_byte else phase)


async def test_a_pooled_connection_that_died_is_replaced_without_the_client_noticing(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        closed = []

        async def answer_then_hang_up(request: web.Request) -> web.StreamResponse:
            transport = request.transport
            assert transport is not None
            if transport not in closed:
                closed.append(transport)
                return web.json_response(ANSWER)
            transport.abort()
            return web.Response()

        r.upstream.script = answer_then_hang_up
        assert (await r.chat()).status_code == 200
        assert (await r.chat()).status_code == 200
        ledger = (await r.observer.closed(2))[1]
        assert [(a.reused, a.error) for a in ledger.attempts] == [(True, "first_byte"), (False, None)]


async def test_the_observer_may_come_late_and_misses_nothing_that_fits(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        r.upstream.script = whole(ANSWER)
        answers = await asyncio.gather(*(r.chat() for _ in range(20)))
        assert {answer.status_code for answer in answers} == {200}
        assert len(await r.observer.closed(20)) == 20


async def test_healthz_needs_no_key_and_leaves_no_ledger(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        assert (await httpx.AsyncClient().get(r.origin + "/healthz")).json() == {"status": "ok"}
        r.upstream.script = whole(ANSWER)
        await r.chat()
        assert (await r.ledger()).surface == "chat"
