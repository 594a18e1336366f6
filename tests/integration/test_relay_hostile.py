"""Strangers on both sides: clients that stall, flood and forge, upstreams that lie. Nobody else notices."""

import asyncio
import contextlib
import json
import logging
import re
import socket
from pathlib import Path

import pytest
from aiohttp import web
from gateway_rig import DONE, KEY, Rig, chunk, rig, stream, whole

from gateway import client_protocol, connection, exchange
from gateway.reporter import Reporter
from tracing.ledger import Outcome

GOOD = {"choices": [{"message": {"content": "x"}, "finish_reason": "stop"}]}


async def raw(r: Rig, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", r.settings.server.port)
    writer.write(data)
    return reader, writer


def head(*lines: str, length: int) -> bytes:
    fixed = [
        "POST /v1/chat/completions HTTP/1.1",
        "host: x",
        f"authorization: Bearer {KEY}",
        f"content-length: {length}",
    ]
    return "\r\n".join([*fixed, *lines, "", ""]).encode()


async def test_a_number_that_no_record_can_hold_is_refused_and_spoils_nobodys_record(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        r.upstream.script = whole(GOOD)
        answers = await asyncio.gather(r.chat(), r.chat(n=2**64 + 1), r.chat())
        assert [answer.status_code for answer in answers] == [200, 400, 200]
        assert len(await r.observer.closed(3)) == 3


async def test_a_record_that_cannot_be_encoded_is_lost_alone_and_counted(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        reporter: Reporter = r.worker._reporter
        r.upstream.script = whole(GOOD)
        await r.chat()
        (ledger,) = await r.observer.closed(1)
        ledger.choices = 2**70
        reporter.closed(ledger)
        await r.chat()
        assert len(await r.observer.closed(2)) == 2
        assert reporter.dropped == 1


@pytest.mark.parametrize(
    "lie",
    [
        {"usage": {"prompt_tokens": -5, "completion_tokens": 10**25}},
        {"timings": {"prompt_ms": 1e308, "queue_ms": 1e308}},
        {"timings": {"prompt_n": 10**25}},
        {"timings": {"prompt_ms": -1}},
        {"timings": {"predicted_ms": float("nan")}},
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
async def test_an_upstreams_impossible_numbers_are_unknown(tmp_path: Path, lie: dict, streaming: bool) -> None:
    async with rig(tmp_path) as r:
        r.upstream.script = stream(chunk("x", finish="stop", **lie), DONE) if streaming else whole(GOOD | lie)
        assert (await r.chat(stream=streaming)).status_code in (200, 502)
        ledger = await r.ledger()
        assert ledger.timings is None
        assert ledger.usage.input_tokens is None
        assert ledger.usage.output_tokens in (None, 1)


async def test_marks_that_claim_our_clock_but_cannot_be_are_dropped(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        host = r.worker._state(0).host
        marks = {"received": 1, "queued": 2, "scheduled": 3, "prefill_end": 4}
        identity = {"host_id": host.host_id, "boot_id": host.boot_id, "time_namespace": host.time_namespace}
        timings = {"prompt_ms": 1.0, "marks": marks, "host": identity}
        r.upstream.script = whole(GOOD | {"timings": timings})
        await r.chat()
        found = (await r.ledger()).timings
        assert found is not None
        assert (found.marks, found.prompt_ms) == (None, 1.0)


async def test_json_nested_beyond_reason_passes_and_breaks_nothing(tmp_path: Path) -> None:
    deep = b'{"choices":[{"delta":{"content":' + b"[" * 50_000 + b"]" * 50_000 + b"}}]}"

    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(body=deep, content_type="application/json")

    async with rig(tmp_path) as r:
        r.upstream.script = stream(b"data: " + deep + b"\n\n", chunk("x", finish="stop"), DONE)
        assert (await r.chat(stream=True)).status_code == 200
        r.upstream.script = answer
        assert (await r.chat()).status_code in (200, 502)
        assert {ledger.outcome for ledger in await r.observer.closed(2)} <= {Outcome.OK, Outcome.UPSTREAM_ERROR}


@pytest.mark.parametrize("value", ["²", "9" * 400, "Wed, 21 Oct 2026 07:28:00 GMT", "-1"])
async def test_any_retry_after_of_an_upstream_is_survived(tmp_path: Path, value: str) -> None:
    async def busy(request: web.Request) -> web.StreamResponse:
        response = web.json_response({"error": {"message": "busy"}}, status=503)
        response.headers["retry-after"] = value
        return response

    async with rig(tmp_path) as r:
        r.upstream.script = busy
        assert (await r.chat()).status_code == 503


async def test_a_stream_that_begins_with_a_byte_order_mark_keeps_its_first_token(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        r.upstream.script = stream(b"\xef\xbb\xbf" + chunk("a"), chunk("b", finish="stop"), DONE)
        await r.chat(stream=True)
        assert (await r.ledger()).token_events == 2


async def test_headers_for_this_hop_only_stay_on_it(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        r.upstream.script = whole(GOOD, connection="x-up", **{"x-up": "1", "x-kept": "2"})
        r.client.headers.update({"connection": "keep-alive, x-hop", "x-hop": "1", "x-end": "2"})
        answer = await r.chat()
        assert "x-hop" not in r.upstream.headers[0]
        assert r.upstream.headers[0]["x-end"] == "2"
        assert "x-up" not in answer.headers
        assert answer.headers["x-kept"] == "2"


async def test_a_key_in_a_url_is_repeated_nowhere(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        secret = "sk-tl-ABCDEF0123456789"
        for path in (f"/{secret}/v1/chat/completions", f"/v1/models/{secret}"):
            answer = await r.client.get(path)
            assert secret not in answer.text
        assert all(secret not in ledger.path for ledger in await r.observer.closed(2))


async def test_a_head_without_end_is_refused_before_it_costs_anything(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        reader, writer = await raw(r, b"GET /healthz HTTP/1.1\r\nx: ")
        for _ in range(20):
            writer.write(b"y" * 10_000)
        assert b"431" in await reader.readline()
        writer.close()
        body = b'{"model":"m"}'
        r.upstream.script = whole(GOOD)
        reader, writer = await raw(r, head(*(f"x-large-{n}: {'y' * 7000}" for n in range(8)), length=len(body)) + body)
        assert b"200" in await reader.readline()
        writer.close()


async def test_a_head_that_never_ends_in_time_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_protocol, "HEAD_SECONDS", 0.2)
    async with rig(tmp_path) as r:
        for begun in (b"", b"GET /healthz HT", head(length=5)[:-2]):
            reader, writer = await raw(r, begun)
            async with asyncio.timeout(3):
                assert await reader.read() == b""
            writer.close()


async def test_a_refusal_is_heard_by_a_client_that_goes_on_sending_its_body(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        size = 3 * client_protocol.MAX_HEAD_BYTES
        reader, writer = await raw(r, head(length=size).replace(KEY.encode(), b"wrong") + b"x" * size)
        answer = await reader.readuntil(b"\r\n\r\n")
        assert b" 401 " in answer.partition(b"\r\n")[0]
        await reader.readexactly(int(re.search(rb"content-length: (\d+)", answer)[1]))  # type: ignore[index]
        # The connection serves on, and nothing was said in between.
        writer.write(b"GET /healthz HTTP/1.1\r\nhost: h\r\n\r\n")
        assert b" 200 " in await reader.readline()
        writer.close()


async def test_what_comes_after_a_request_without_being_one_does_not_keep_its_connection_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_protocol, "HEAD_SECONDS", 0.3)
    monkeypatch.setattr(client_protocol, "MAX_UNREAD_BYTES", 2**20)
    refused = head(length=2**22).replace(KEY.encode(), b"wrong")
    healthy = b"GET /healthz HTTP/1.1\r\nhost: h\r\n\r\n"
    async with rig(tmp_path) as r:
        for first, later in ((healthy, b"\r\n"), (refused, b"x"), (refused, b"x" * 2**21)):
            reader, writer = await raw(r, first)
            await reader.readuntil(b"\r\n\r\n")
            writer.write(later)
            async with asyncio.timeout(3):
                with contextlib.suppress(ConnectionError):
                    await reader.read()
            writer.close()


async def test_trailers_without_end_are_cut_off(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        reader, writer = await raw(
            r, head(length=0).replace(b"content-length: 0", b"transfer-encoding: chunked") + b"0\r\nx: "
        )
        async with asyncio.timeout(3):
            with contextlib.suppress(ConnectionError):
                while True:
                    writer.write(b"y" * 10_000)
                    await writer.drain()
                    await asyncio.sleep(0)
        assert (await r.ledger()).outcome is Outcome.CLIENT_CANCELLED
        del reader


async def test_a_client_that_leaves_with_another_request_waiting_behind_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig(tmp_path) as r:
        r.upstream.script = stream(60.0)
        body = b'{"model":"m"}'
        one = head(length=len(body)) + body
        monkeypatch.setattr(logging.getLogger("uvicorn.error"), "handlers", [caplog.handler])
        _reader, writer = await raw(r, one + one)
        await r.upstream.asked.wait()
        writer.close()
        await r.upstream.cancelled.wait()
        assert (await r.ledger()).outcome is Outcome.CLIENT_CANCELLED
    assert caplog.text == ""


async def test_a_few_requests_sent_ahead_are_answered_in_turn_and_a_flood_of_them_is_cut_off(tmp_path: Path) -> None:
    one = b"GET /api/hello HTTP/1.1\r\nhost: h\r\n\r\n"
    async with rig(tmp_path) as r:
        reader, writer = await raw(r, one * client_protocol.MAX_PIPELINED)
        for _ in range(client_protocol.MAX_PIPELINED):
            assert b" 200 " in await reader.readuntil(b"\r\n")
            await reader.readuntil(b'{"message":"hello"}')
        writer.close()
        reader, writer = await raw(r, one * 2000)
        async with asyncio.timeout(3):
            with contextlib.suppress(ConnectionError):
                assert (await reader.read()).count(b" 200 ") < 2000
        writer.close()


async def test_a_client_that_reads_no_answer_of_the_gateways_own_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "FAREWELL_SECONDS", 0.2)
    monkeypatch.setattr(connection, "WRITE_LIMIT_BYTES", 2**12)
    async with rig(tmp_path) as r:
        _reader, writer = await raw(r, b"")
        writer.transport.pause_reading()
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**12)
        writer.write(b"GET /api/openapi.json HTTP/1.1\r\nhost: h\r\n\r\n" * client_protocol.MAX_PIPELINED)
        async with asyncio.timeout(5):
            while "client_too_slow" not in [ledger.error_code for ledger in await r.observer.closed(0)]:
                await asyncio.sleep(0.05)
        writer.transport.abort()


async def test_a_client_that_sends_another_request_and_leaves_is_noticed_at_once(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        r.upstream.script = stream(60.0)
        body = b'{"model":"m"}'
        one = head(length=len(body)) + body
        _reader, writer = await raw(r, one)
        await r.upstream.asked.wait()
        writer.write(one)
        await asyncio.sleep(0.05)
        writer.close()
        async with asyncio.timeout(3):
            await r.upstream.cancelled.wait()


@pytest.mark.parametrize("framing", ["content-length: 13", "transfer-encoding: chunked"])
async def test_a_client_that_would_rather_change_the_protocol_is_served_as_it_is(tmp_path: Path, framing: str) -> None:
    body = b'{"model":"m"}' if "length" in framing else b'6\r\n{"mode\r\n7\r\nl":"m"}\r\n0\r\n\r\n'
    wish = ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAEAAEAAAAIAAAAB")
    one = head(*wish, length=13).replace(b"content-length: 13", framing.encode()) + body
    async with rig(tmp_path) as r:
        r.upstream.script = whole(GOOD)
        for cut in (1, one.index(b"\r\n\r\n") + 4, len(one) - 3, len(one)):
            reader, writer = await raw(r, one[:cut])
            await asyncio.sleep(0.02)
            writer.write(one[cut:] + one)  # and again on the same connection
            for _ in range(2):
                answer = await reader.readuntil(b"\r\n\r\n")
                assert b" 200 " in answer.partition(b"\r\n")[0]
                await reader.readexactly(int(re.search(rb"content-length: (\d+)", answer)[1]))  # type: ignore[index]
            writer.close()
        last = one.replace(b"connection: ", b"connection: close, ")
        reader, writer = await raw(r, last)
        assert b" 200 " in (await reader.read()).partition(b"\r\n")[0]
        writer.close()
        assert {bytes(found) for found in r.upstream.bodies} == {b'{"model":"m"}'}
        assert not {"upgrade", "http2-settings"} & r.upstream.headers[0].keys()
        reader, writer = await raw(r, b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\n")
        assert b" 400 " in await reader.readline()
        writer.close()


async def test_a_body_that_stalls_is_told_so_and_let_go(tmp_path: Path) -> None:
    async with rig(tmp_path, server={"receive_timeout_seconds": 0.2}) as r:
        reader, _writer = await raw(r, head(length=1000) + b"{")
        async with asyncio.timeout(3):
            answer = await reader.read()
        assert b"408" in answer.partition(b"\r\n")[0]
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"
        assert (await r.ledger()).outcome is Outcome.CLIENT_ERROR


async def test_a_client_that_reads_nothing_is_cut_off_and_not_called_a_slow_upstream(tmp_path: Path) -> None:
    async with rig(tmp_path, server={"client_write_timeout_seconds": 0.3}) as r:
        r.upstream.script = stream(*[chunk("x" * 100_000)] * 100, chunk(finish="stop"), DONE)
        body = b'{"model":"m","stream":true}'
        _reader, writer = await raw(r, head(length=len(body)) + body)
        writer.transport.pause_reading()
        ledger = await r.ledger()
        assert (ledger.outcome, ledger.error_code) == (Outcome.CLIENT_CANCELLED, "client_too_slow")
        assert ledger.backpressure_ns > 0.2e9
        await r.upstream.cancelled.wait()
        assert r.worker._state(0).inflight == {"a": 0}
        writer.close()
