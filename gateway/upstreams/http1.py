"""One HTTP/1.1 connection to an upstream: one request at a time, its answer read as it arrives (RFC 9112).

httptools (llhttp, as strict as it comes) parses; here is only what surrounds it: who waits for what, and when a
connection may be used again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httptools

MAX_HEAD_BYTES = 2**16
"""Of an answer's status line and headers: more than that, in one line, is more than Python's own client takes.

As much may come later without a byte of the body: trailers, extensions of chunks.
"""
STALE_SECONDS = 1.0
"""An upstream that closes a used connection later than this after a request has had time to work on it."""
READ_BUFFER_BYTES = 2**20
"""Nothing more is read from the upstream when this much has not been forwarded yet."""
PIECE_BYTES = 2**16
"""A larger request body goes out in pieces, each waiting for room in the socket."""

Headers = list[tuple[bytes, bytes]]


class UpstreamFault(Exception):
    """The upstream, or the way to it, failed."""


class ConnectFailed(UpstreamFault):
    """There is no connection to be had."""


class ConnectionLost(UpstreamFault):
    """The connection ended before the answer did."""


class FoundDead(ConnectionLost):
    """A connection that had served before ended without a byte of an answer: the request met a closed door."""


class ProtocolBroken(UpstreamFault):
    """What came is not HTTP/1.1."""


class Http1Connection(asyncio.Protocol):
    """A connection; `exchange` after `exchange`, each of which ends before the next begins."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None
        """Made while the transport holds more than it likes to."""
        self._fault: UpstreamFault | None = None
        self._is_asked = False
        self._has_served = False
        self._is_reading = True
        self._may_last = True
        self._begin()

    def _begin(self) -> None:
        self.status = 0
        self.headers: Headers = []
        self._dry_bytes = 0
        """Read since the last byte of the body; before the head, since the request. Reads are counted whole."""
        self._is_silent = True
        self._sent_at: float | None = None
        self._header_bytes = 0
        self._has_head = False
        self._is_complete = False
        self._pieces: list[bytes] = []
        self._buffered = 0

    @property
    def is_reusable(self) -> bool:
        """Whether another request may follow: the answer is complete, and both sides keep the connection open."""
        return self._may_last and self._is_complete and self._fault is None and not self._transport.is_closing()

    async def ask(self, head: bytes, body: bytes, before_last: Callable[[], None]) -> None:
        """Sends a request and waits for the head of its answer: `status` and `headers` are there then.

        `before_last` is called as the last piece goes to the transport. Raises UpstreamFault.
        """
        self._begin()
        self._is_asked = True
        await self._send(head, body, before_last)
        while not self._has_head:
            await self._something()

    async def _send(self, head: bytes, body: bytes, before_last: Callable[[], None]) -> None:
        last = max(0, (len(body) - 1) // PIECE_BYTES * PIECE_BYTES)
        if last:
            self._transport.write(head)
            head = b""
        for start in range(0, last, PIECE_BYTES):
            self._transport.write(body[start : start + PIECE_BYTES])
            if self._room is not None:
                await self._room
            if self._has_head or self._fault is not None:
                # It answers before it has heard everything: it will not read the rest.
                self._may_last = False
                return
        before_last()
        self._sent_at = self._loop.time()
        self._transport.write(head + (body[last:] if last else body))

    async def read(self) -> bytes:
        """What arrived, as soon as anything did; empty at the end. Raises UpstreamFault."""
        while not self._pieces:
            if self._is_complete:
                return b""
            await self._something()
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self._buffered = 0
        if not self._is_reading:
            self._is_reading = True
            self._transport.resume_reading()
        return data

    async def _something(self) -> None:
        """Waits for bytes of the answer, or for its end."""
        if self._fault is not None:
            raise self._fault
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def rest(self) -> None:
        """The answer has been read: nothing may come until the next request."""
        self._is_asked = False
        self._has_served = True

    def close(self) -> None:
        """Ends the connection at once."""
        self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        if not self._is_asked or self._fault is not None:
            self._fail(ProtocolBroken("bytes that nobody asked for"))
            return
        self._is_silent = False
        self._dry_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(ProtocolBroken(str(error)))
            return
        if self._dry_bytes > MAX_HEAD_BYTES and not self._is_complete:
            self._fail(ProtocolBroken(f"headers, trailers or chunk extensions of more than {MAX_HEAD_BYTES} bytes"))
            return
        if self._has_head:
            self.resume_writing()  # who still sends the request waits for room that may never be made
        if self._buffered > READ_BUFFER_BYTES and self._is_reading and not self._is_complete:
            self._is_reading = False
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> None:
        if self._has_head and not self._is_complete and self._ends_with_connection():
            self._is_complete = True
            self._may_last = False
            self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._may_last = False
        if not self._is_complete:
            kind = FoundDead if self._is_stale() else ConnectionLost
            self._fault = self._fault or kind(str(exc or "closed"))
        self._wake()
        self.resume_writing()

    def _is_stale(self) -> bool:
        """Whether the upstream had closed the connection before it saw the request, as far as can be told."""
        is_soon = self._sent_at is None or self._loop.time() - self._sent_at < STALE_SECONDS
        return self._has_served and self._is_silent and is_soon

    def pause_writing(self) -> None:
        self._room = self._loop.create_future()

    def resume_writing(self) -> None:
        room, self._room = self._room, None
        if room is not None and not room.done():
            room.set_result(None)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, fault: UpstreamFault) -> None:
        self._may_last = False
        self._fault = self._fault or fault
        self._transport.abort()
        self._wake()

    def _ends_with_connection(self) -> bool:
        """The answer has no length of its own (RFC 9112, 6.3)."""
        return not any(name in (b"content-length", b"transfer-encoding") for name, _ in self.headers)

    # httptools

    def on_message_begin(self) -> None:
        if self._is_complete:
            self._may_last = False  # an answer without a question behind this one

    def on_header(self, name: bytes, value: bytes) -> None:
        # After the head these are trailers, which nobody reads.
        if self._has_head:
            return
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > MAX_HEAD_BYTES:
            raise ProtocolBroken(f"headers of more than {MAX_HEAD_BYTES} bytes")
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._has_head:
            return  # of an answer behind this one
        status = self._parser.get_status_code()
        if status < 200:
            self.headers = []  # 1xx: the answer is still to come
        else:
            self.status = status
            self._has_head = True
            self._dry_bytes = 0
            self._may_last = self._may_last and self._parser.should_keep_alive()

    def on_body(self, data: bytes) -> None:
        self._dry_bytes = 0
        if not self._is_complete:
            self._pieces.append(data)
            self._buffered += len(data)

    def on_message_complete(self) -> None:
        self._is_complete = self._has_head
