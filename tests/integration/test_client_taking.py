"""How clients take their answers, on the event loop that the gateway runs on, with and without TLS."""

import asyncio
import json
import logging
import socket
import ssl
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop
from gateway_rig import ANSWER, DONE, KEY, Rig, chunk, rig, stream, whole

from gateway import connection, exchange
from tracing.ledger import Outcome

Taker = Callable[[socket.socket], bytes]


@pytest.fixture
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    return uvloop.EventLoopPolicy()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    where = tmp_path_factory.mktemp("certificate")
    found = {"tls_cert": where / "cert.pem", "tls_key": where / "key.pem"}
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1",
         "-subj", "/CN=localhost", "-keyout", found["tls_key"], "-out", found["tls_cert"]],
        check=True, capture_output=True,
    )  # fmt: skip
    return dict(found)


@pytest.fixture(params=["plain", "tls"])
def server(request: pytest.FixtureRequest, certificate: dict[str, object]) -> dict[str, object]:
    return dict(certificate) if request.param == "tls" else {}


async def ask(r: Rig, take: Taker, *, stream: bool = True) -> bytes:
    """Asks from a thread of its own, over a socket that holds little; what `take` got of the answer."""

    def run() -> bytes:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(10)
        client.connect(("127.0.0.1", r.settings.server.port))
        if r.settings.server.tls_cert is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            client = context.wrap_socket(client)
        with client:
            body = json.dumps({"model": "m", "stream": stream}).encode()
            head = (
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %s\r\ncontent-length: %d\r\n"
            )
            client.sendall(head % (KEY.encode(), len(body)) + b"\r\n" + body)
            return take(client)

    return await asyncio.to_thread(run)


def to_end(client: socket.socket, bytes_a_second: float = 1e9) -> bytes:
    """The whole streamed answer, at that pace."""
    found, since = bytearray(), time.monotonic()
    while not found.endswith(b"0\r\n\r\n"):
        piece = client.recv(2**14)
        if not piece:
            break
        found += piece
        time.sleep(max(0.0, since + len(found) / bytes_a_second - time.monotonic()))
    return bytes(found)


async def test_a_quick_reader_is_charged_nothing_and_nothing_is_logged(
    tmp_path: Path, server: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    async with rig(tmp_path, server=server) as r:
        r.upstream.script = stream(*[chunk("x"), 0.01] * 10, chunk(finish="stop"), DONE)
        assert b"[DONE]" in await ask(r, to_end)
        assert (await r.ledger()).backpressure_ns == 0
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_a_pause_of_the_reader_is_charged_and_not_the_time_beside_it(
    tmp_path: Path, server: dict[str, object]
) -> None:
    def pausing(client: socket.socket) -> bytes:
        first = client.recv(100)
        time.sleep(0.4)
        return first + to_end(client)

    async with rig(tmp_path, server=server) as r:
        # Little enough that a buffer of uvloop's TLS could hide it.
        r.upstream.script = stream(*[chunk("x" * 3_000), 0.005] * 20, 0.7, chunk(finish="stop"), DONE)
        assert b"[DONE]" in await ask(r, pausing)
        ledger = await r.ledger()
        assert 0.25e9 < ledger.backpressure_ns < ledger.finish - ledger.ingress - 0.25e9


async def test_a_slow_reader_is_not_cut_off_while_it_keeps_taking(tmp_path: Path, server: dict[str, object]) -> None:
    async with rig(tmp_path, server={"client_write_timeout_seconds": 0.5, **server}) as r:
        r.upstream.script = stream(*[chunk("x" * 50_000)] * 50, chunk(finish="stop"), DONE)
        answer = await ask(r, lambda client: to_end(client, 1.2e6))
        assert answer.count(b"x" * 50_000) == 50
        ledger = await r.ledger()
        assert ledger.outcome is Outcome.OK
        assert 0.5e9 < ledger.backpressure_ns <= ledger.finish - ledger.ingress


async def test_a_slow_reader_hears_of_an_error_in_the_midst_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "FAREWELL_SECONDS", 0.4)
    async with rig(tmp_path) as r:
        r.upstream.script = stream(chunk("x" * 1_500_000))  # and then it breaks off
        answer = await ask(r, lambda client: to_end(client, 1.5e6))
        assert answer.count(b"x" * 1_500_000) == 1
        assert b"upstream_error" in answer
        assert (await r.ledger()).backpressure_ns > 0.4e9


async def test_the_rest_of_an_answer_that_nobody_takes_is_thrown_away(
    tmp_path: Path, server: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "REST_SECONDS", 0.2)
    choice = {"index": 0, "message": {"role": "assistant", "content": "x" * 3_000_000}, "finish_reason": "stop"}
    async with rig(tmp_path, server=server) as r:
        r.upstream.script = whole({**ANSWER, "choices": [choice]})
        kept: list[socket.socket] = []

        def leave_it(client: socket.socket) -> bytes:
            kept.append(
                client.dup() if not isinstance(client, ssl.SSLSocket) else socket.socket(fileno=client.detach())
            )
            return b""

        await ask(r, leave_it, stream=False)
        assert (await r.ledger()).unsent_bytes > 2_000_000
        async with asyncio.timeout(5):
            while r.server.server_state.connections:
                await asyncio.sleep(0.02)
        kept.pop().close()


async def test_over_tls_a_client_that_closes_its_side_has_left(
    tmp_path: Path, certificate: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    def leaving(client: socket.socket) -> bytes:
        time.sleep(0.2)
        found = client.recv(100)
        client.shutdown(socket.SHUT_WR)
        time.sleep(0.3)
        return found

    async with rig(tmp_path, server=certificate) as r:
        r.upstream.script = stream(*[chunk("x" * 20_000), 0.005] * 1000)
        await ask(r, leaving)
        assert (await r.ledger()).outcome is Outcome.CLIENT_CANCELLED
        await r.upstream.cancelled.wait()
    assert not [record for record in caplog.records if "SSL connection is closed" in record.getMessage()]
