"""Connections to upstreams on real sockets: TCP, TLS, Unix sockets; reused, grown old, gone."""

import asyncio
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.upstreams import pool as pool_module
from gateway.upstreams.http1 import ConnectFailed, FoundDead
from gateway.upstreams.pool import Pool
from gateway.upstreams.router import Upstream

HEAD = b"GET / HTTP/1.1\r\nhost: h\r\n\r\n"


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while await reader.readuntil(b"\r\n\r\n"):
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")


async def _quietly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        await _serve(reader, writer)
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


@asynccontextmanager
async def serving(**options: Any) -> AsyncIterator[int]:
    server = await asyncio.start_server(_quietly, "127.0.0.1", 0, **options)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def asked(pool: Pool) -> bytes:
    connection = pool.idle() or await pool.connect()
    answer = await pool.ask(connection, HEAD, b"", lambda: None)
    body = await answer.read()
    assert await answer.read() == b""
    answer.close()
    return body


async def test_a_connection_is_used_again_until_it_has_rested_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "KEEPALIVE_SECONDS", 0.2)
    async with serving() as port:
        pool = Pool(Upstream("a", f"http://127.0.0.1:{port}/v1"))
        assert await asked(pool) == b"ok"
        first = pool.idle()
        assert first is not None
        pool.give_back(first)
        assert await asked(pool) == b"ok"
        assert pool.idle() is first
        pool.give_back(first)
        async with asyncio.timeout(5):
            while first.is_reusable:
                await asyncio.sleep(0.02)
        assert pool.idle() is None
        pool.close()


async def test_an_answer_that_is_left_early_takes_its_connection_along() -> None:
    async with serving() as port:
        pool = Pool(Upstream("a", f"http://127.0.0.1:{port}/v1"))
        connection = await pool.connect()
        asking = asyncio.create_task(pool.ask(connection, b"GET / HTTP/1.1\r\n", b"", lambda: None))
        await asyncio.sleep(0.05)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert not connection.is_reusable
        assert pool.idle() is None


async def test_a_unix_socket_is_an_address_too(tmp_path: Path) -> None:
    async with await asyncio.start_unix_server(_quietly, tmp_path / "s"):
        pool = Pool(Upstream("a", "http://localhost/v1", unix_socket=str(tmp_path / "s")))
        assert await asked(pool) == b"ok"
        pool.close()


async def test_tls_is_spoken_and_a_stranger_s_certificate_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", cert], check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    async with serving(ssl=context) as port:
        upstream = Upstream("a", f"https://localhost:{port}/v1")
        with pytest.raises(ConnectFailed, match="certificate"):
            await Pool(upstream).connect()
        monkeypatch.setenv("SSL_CERT_FILE", str(cert))
        pool = Pool(upstream)
        assert await asked(pool) == b"ok"
        pool.close()


async def test_nobody_there_is_told_as_no_connection() -> None:
    async with serving() as port:
        pass
    for url in (f"http://127.0.0.1:{port}/v1", "http://nobody.invalid/v1"):
        with pytest.raises(ConnectFailed):
            await Pool(Upstream("a", url)).connect()


async def test_a_connection_found_dead_takes_those_along_that_rest_longer() -> None:
    gone: list[asyncio.StreamWriter] = []

    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        if len(gone) == 3:
            await reader.readuntil(b"\r\n\r\n")  # asked again: the door closes
        gone.append(writer)
        if len(gone) > 3:
            writer.close()

    async with await asyncio.start_server(once, "127.0.0.1", 0) as server:
        pool = Pool(Upstream("a", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"))
        answers = [await pool.ask(await pool.connect(), HEAD, b"", lambda: None) for _ in range(4)]
        for answer in answers:
            answer.close()
        with pytest.raises(FoundDead):
            await asked(pool)
        assert pool.idle() is None
        pool.close()


async def test_an_address_that_gives_no_connection_does_not_keep_the_next_one_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lookups = 0
    with socket.socket() as silent, socket.socket() as first, socket.socket() as second:
        silent.bind(("127.0.0.2", 0))
        silent.listen(0)
        port = silent.getsockname()[1]
        for filler in (first, second):  # a full backlog: the kernel drops whoever else knocks
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.2", port))
        await asyncio.sleep(0.05)

        async def lookup(_host: str, _port: int, **_: Any) -> list[Any]:
            nonlocal lookups
            lookups += 1
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port)) for host in ("127.0.0.2", "127.0.0.1")]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", lookup)
        async with await asyncio.start_server(_quietly, "127.0.0.1", port):
            pool = Pool(Upstream("a", f"http://two.invalid:{port}/v1"))
            async with asyncio.timeout(3):
                connections = await asyncio.gather(pool.connect(), pool.connect())
            assert lookups == 1
            for connection in connections:
                connection.close()
            pool.close()
