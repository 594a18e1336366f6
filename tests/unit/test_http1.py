"""The relay's HTTP/1.1 connection to an upstream, on a transport that only remembers."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transports import RememberingTransport

from gateway.upstreams.http1 import (
    MAX_HEAD_BYTES,
    PIECE_BYTES,
    READ_BUFFER_BYTES,
    ConnectionLost,
    FoundDead,
    Http1Connection,
    ProtocolBroken,
    UpstreamFault,
)

STREAM = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"5\r\nhello\r\n7;x=y\r\n, world\r\n0\r\nX-Trailer: t\r\n\r\n"
)
SIZED = b"HTTP/1.1 200 OK\r\ncontent-length: 12\r\n\r\nhello, world"
INTERIM = b"HTTP/1.1 100 Continue\r\nx-interim: 1\r\n\r\n"


class Bench:
    """A connection that has been asked something."""

    def __init__(self, body: bytes = b"{}") -> None:
        self.transport = RememberingTransport()
        self.connection = Http1Connection()
        self.connection.connection_made(self.transport)
        self.sent_before: int | None = None
        self.asking = asyncio.create_task(self.connection.ask(b"POST / HTTP/1.1\r\n\r\n", body, self._before_last))

    def _before_last(self) -> None:
        self.sent_before = len(self.transport.written)

    async def body(self) -> bytes:
        await self.asking
        pieces = []
        while piece := await self.connection.read():
            pieces.append(piece)
        return b"".join(pieces)


async def begun(body: bytes = b"{}") -> Bench:
    bench = Bench(body)
    await asyncio.sleep(0)
    return bench


async def answered_with(*pieces: bytes) -> tuple[Bench, bytes]:
    bench = await begun()
    for piece in pieces:
        bench.connection.data_received(piece)
    return bench, await bench.body()


@given(answer=st.sampled_from([STREAM, SIZED, INTERIM + SIZED]), cuts=st.lists(st.integers(1, 160), max_size=6))
def test_an_answer_is_the_same_wherever_it_is_cut(answer: bytes, cuts: list[int]) -> None:
    async def check() -> None:
        ends = sorted({min(cut, len(answer)) for cut in cuts} | {len(answer)})
        pieces = [answer[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        bench, body = await answered_with(*pieces)
        assert (bench.connection.status, body, bench.connection.is_reusable) == (200, b"hello, world", True)
        assert b"x-interim" not in dict(bench.connection.headers)
        assert b"x-trailer" not in dict(bench.connection.headers)

    asyncio.run(check())


async def test_an_answer_without_a_length_ends_with_its_connection_and_is_the_last_one() -> None:
    bench = await begun()
    bench.connection.data_received(b"HTTP/1.1 200 OK\r\n\r\nhello")
    bench.connection.eof_received()
    assert await bench.body() == b"hello"
    assert not bench.connection.is_reusable


@pytest.mark.parametrize("cut", [b"", b"HTTP/1.1 200", STREAM[:-5], SIZED[:-1]])
async def test_a_connection_that_ends_too_early_is_lost(cut: bytes) -> None:
    bench = await begun()
    if cut:
        bench.connection.data_received(cut)
    bench.connection.eof_received()
    bench.connection.connection_lost(None)
    with pytest.raises(ConnectionLost):
        await bench.body()


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"a" * MAX_HEAD_BYTES,
        b"HTTP/1.1 200 OK\r\nx: " + b"a" * MAX_HEAD_BYTES + b"\r\ncontent-length: 0\r\n\r\n",
    ],
)
async def test_what_is_no_clean_http_is_refused_and_the_connection_ended(answer: bytes) -> None:
    bench = await begun()
    bench.connection.data_received(answer)
    with pytest.raises(ProtocolBroken):
        await bench.body()
    assert bench.transport.is_aborted


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 12\r\n\r\nhello, world",
        b"HTTP/1.0 200 OK\r\ncontent-length: 12\r\n\r\nhello, world",
        SIZED + SIZED,
        SIZED + b"HTTP/1.1 ",
    ],
)
async def test_an_answer_that_is_the_last_or_has_another_behind_it_lets_no_request_follow(answer: bytes) -> None:
    bench, body = await answered_with(answer)
    assert body == b"hello, world"
    assert not bench.connection.is_reusable


async def test_the_head_of_an_answer_behind_this_one_changes_nothing_of_it() -> None:
    bench, body = await answered_with(SIZED + INTERIM)
    assert (body, bench.connection.headers) == (b"hello, world", [(b"content-length", b"12")])
    assert not bench.connection.is_reusable


@pytest.mark.parametrize("endless", [b"0\r\nx: ", b"5;x=", b"0\r\n"])
async def test_trailers_and_extensions_without_end_are_refused(endless: bytes) -> None:
    bench = await begun()
    bench.connection.data_received(STREAM[: STREAM.index(b"5\r\n")] + endless)
    for _ in range(MAX_HEAD_BYTES // 4096 + 1):
        bench.connection.data_received(b"a: b\r\n" * 683 if endless == b"0\r\n" else b"a" * 4096)
    with pytest.raises(ProtocolBroken, match="trailers"):
        await bench.body()
    assert bench.transport.is_aborted


async def test_a_long_body_in_small_chunks_is_no_flood() -> None:
    bench, body = await answered_with(STREAM[: STREAM.index(b"5\r\n")], *[b"1\r\nx\r\n"] * 20_000, b"0\r\n\r\n")
    assert body == b"x" * 20_000
    assert bench.connection.is_reusable


async def test_a_connection_at_rest_that_speaks_is_ended() -> None:
    bench, _ = await answered_with(SIZED)
    bench.connection.rest()
    assert bench.connection.is_reusable
    bench.connection.data_received(b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\n\r\n")
    assert bench.transport.is_aborted
    assert not bench.connection.is_reusable


async def test_a_second_request_gets_its_own_answer() -> None:
    bench, _ = await answered_with(STREAM)
    bench.connection.rest()
    bench.asking = asyncio.create_task(bench.connection.ask(b"POST /2 HTTP/1.1\r\n\r\n", b"", lambda: None))
    await asyncio.sleep(0)
    bench.connection.data_received(b"HTTP/1.1 404 Not Found\r\nx: 2\r\ncontent-length: 2\r\n\r\nno")
    assert await bench.body() == b"no"
    assert (bench.connection.status, bench.connection.headers) == (404, [(b"x", b"2"), (b"content-length", b"2")])


async def test_nothing_more_is_read_while_much_waits_to_be_forwarded() -> None:
    bench = await begun()
    size = 3 * READ_BUFFER_BYTES
    bench.connection.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
    bench.connection.data_received(b"x" * (READ_BUFFER_BYTES + 1))
    assert not bench.transport.is_reading_now
    await bench.asking
    assert len(await bench.connection.read()) == READ_BUFFER_BYTES + 1
    assert bench.transport.is_reading_now


async def test_a_large_body_waits_for_room_and_is_stamped_before_its_last_piece() -> None:
    bench = Bench(b"x" * (2 * PIECE_BYTES + 1))
    bench.connection.pause_writing()
    await asyncio.sleep(0)
    assert sum(map(len, bench.transport.written[1:])) == PIECE_BYTES
    bench.connection.resume_writing()
    await asyncio.sleep(0)
    assert (len(bench.transport.written), bench.sent_before) == (4, 3)
    assert b"".join(bench.transport.written[1:]) == b"x" * (2 * PIECE_BYTES + 1)
    bench.connection.data_received(SIZED)
    assert await bench.body() == b"hello, world"


async def test_an_answer_that_comes_before_the_whole_request_is_taken_and_the_rest_not_sent() -> None:
    bench = Bench(b"x" * (4 * PIECE_BYTES))
    bench.connection.pause_writing()
    await asyncio.sleep(0)
    bench.connection.data_received(b"HTTP/1.1 413 Content Too Large\r\ncontent-length: 2\r\n\r\nno")
    bench.connection.connection_lost(None)
    assert await bench.body() == b"no"
    assert (bench.connection.status, bench.sent_before, bench.connection.is_reusable) == (413, None, False)


async def test_an_upstream_that_answers_and_stops_reading_is_heard() -> None:
    bench = Bench(b"x" * (4 * PIECE_BYTES))
    bench.connection.pause_writing()
    await asyncio.sleep(0)
    bench.connection.data_received(b"HTTP/1.1 413 Content Too Large\r\ncontent-length: 2\r\n\r\nno")
    assert await bench.body() == b"no"
    assert not bench.connection.is_reusable


@pytest.mark.parametrize(
    ("has_served", "seconds", "heard", "fault"),
    [
        (True, 0.1, b"", FoundDead),
        (True, 1.1, b"", ConnectionLost),
        (True, 0.1, b"HTTP/1.1 ", ConnectionLost),
        (False, 0.1, b"", ConnectionLost),
    ],
)
async def test_only_a_used_connection_that_closes_at_once_and_without_a_word_was_dead_before(
    monkeypatch: pytest.MonkeyPatch, has_served: bool, seconds: float, heard: bytes, fault: type[UpstreamFault]
) -> None:
    bench = await begun()
    if has_served:
        bench.connection.data_received(SIZED)
        await bench.body()
        bench.connection.rest()
        bench.asking = asyncio.create_task(bench.connection.ask(b"POST /2 HTTP/1.1\r\n\r\n", b"", lambda: None))
        await asyncio.sleep(0)
    if heard:
        bench.connection.data_received(heard)
    loop = asyncio.get_running_loop()
    later = loop.time() + seconds
    monkeypatch.setattr(loop, "time", lambda: later)
    bench.connection.connection_lost(None)
    monkeypatch.undo()
    with pytest.raises(UpstreamFault) as found:
        await bench.asking
    assert type(found.value) is fault


async def test_a_connection_lost_while_sending_ends_the_wait_for_room() -> None:
    bench = Bench(b"x" * (4 * PIECE_BYTES))
    bench.connection.pause_writing()
    await asyncio.sleep(0)
    bench.connection.connection_lost(ConnectionResetError("reset"))
    with pytest.raises(UpstreamFault, match="reset"):
        await bench.asking
