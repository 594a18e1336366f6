"""HTTP/1.1 with clients: uvicorn's protocol, with the connection in each request's scope and limits around requests."""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gateway.connection import CONNECTION, Connection
from gateway.head_join import HeadJoin

MAX_HEAD_BYTES = 2**16
HEAD_SECONDS = 30.0
MAX_UNREAD_BYTES = 64 * 2**20
MAX_PIPELINED = 64
"""Requests of one connection that may wait for their turn: each costs a hundred times what it takes to send it."""

_FRAMING = (b"content-length", b"transfer-encoding")
_HEAD_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class Protocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 protocol, with the connection in each request's scope, and limits on what surrounds a request.

    Headers over MAX_HEAD_BYTES are refused with 431; a connection whose headers are not complete within HEAD_SECONDS of
    their first byte (or of the connection) is closed. The rest of a body that was answered without being read is thrown
    away, so that the client, which may not listen before it has sent everything, hears the answer: up to
    MAX_UNREAD_BYTES and for HEAD_SECONDS. Who sends more than MAX_PIPELINED requests ahead is cut off.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        joined = HeadJoin(transport)
        super().connection_made(joined)  # type: ignore[arg-type]
        self._connection = Connection(joined, self.flow)
        self._connection.listen()
        self._running: RequestResponseCycle | None = None
        """The request that is served; `cycle` is the one that was read last, which may wait its turn."""
        self._in_message = False
        """Between the end of a head and the end of its body."""
        self._dry_bytes = 0
        """Read since the last byte of a body, or the last head."""
        self._unread_bytes = 0
        self._is_flooded = False
        self._framing = b""
        """Header lines that say how long the body of a message is that the parser has ended early."""
        self._is_own_head = False
        self._due: asyncio.TimerHandle | None = None
        self._allow(HEAD_SECONDS)

    def data_received(self, data: bytes) -> None:
        self._dry_bytes += len(data)
        if not self._in_message and self._dry_bytes > MAX_HEAD_BYTES and not self._fits(data):
            self.transport.write(_HEAD_TOO_LARGE)
            self.transport.close()
            return
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
            return
        if self._is_flooded:
            self.transport.abort()
        elif self._in_message:
            self._bound_rest(len(data))
        elif self._due is None and (self.cycle is None or self.cycle.response_complete):
            # The end of an unread body, or an empty line: uvicorn's timer of a connection at rest does not survive it.
            self._allow(HEAD_SECONDS)

    def _parse(self, data: bytes) -> None:
        """Feeds the parser; a wish to change the protocol is not heard, as RFC 9110, 7.8 allows.

        Java's client, for one, asks for HTTP/2 that way and sends its body all the same. The parser ends the message
        there; the body is then given to another one, behind a head of our own that says the same of its length.
        """
        while data and not self._is_flooded:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as wish:
                data = data[wish.args[0] :]
                if self._framing:
                    framing, self._framing = self._framing, b""
                    self._is_own_head = True
                    # The one before takes nothing more where the client also asked for the connection's end.
                    self.parser = httptools.HttpRequestParser(self)
                    self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
                    self.parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % framing)
                    self._is_own_head = False

    def _bound_rest(self, size: int) -> None:
        """What still comes of a message does not go on for ever."""
        if self._dry_bytes > MAX_HEAD_BYTES:  # trailers, or extensions of chunks
            self.transport.abort()
        elif self.cycle is not None and self.cycle.response_complete:
            self._unread_bytes += size
            if self._unread_bytes > MAX_UNREAD_BYTES:
                self.transport.close()
            elif self._due is None:
                self._allow(HEAD_SECONDS)

    def _fits(self, data: bytes) -> bool:
        """Whether the head ends in `data` within the limit: the rest is body."""
        end = data.find(b"\r\n\r\n")
        return end >= 0 and self._dry_bytes - len(data) + end <= MAX_HEAD_BYTES

    def on_message_begin(self) -> None:
        if self._is_own_head:
            return
        super().on_message_begin()
        self.scope[CONNECTION] = self._connection  # type: ignore[literal-required]
        if self._due is None:
            self._allow(HEAD_SECONDS)

    def on_url(self, url: bytes) -> None:
        if not self._is_own_head:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_own_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._is_own_head:
            return
        self._in_message = True
        self._connection.has_whole_body = False
        self._dry_bytes = self._unread_bytes = 0
        self._cancel_timer()
        if self.parser.should_upgrade():
            self._framing = b"".join([b"%b: %b\r\n" % line for line in self.headers if line[0] in _FRAMING])
        self._is_flooded = len(self.pipeline) >= MAX_PIPELINED
        if self._is_flooded:
            return
        super().on_headers_complete()
        if self.pipeline:
            self.flow.resume_reading()  # uvicorn stops here, and would not hear that the client leaves

    def on_body(self, body: bytes) -> None:
        self._dry_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._framing and not self._is_own_head:
            return  # its body is still to come
        self._in_message = False
        self._connection.has_whole_body = True
        self._cancel_timer()
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        self._unset_keepalive_if_required()
        self._connection.lost()
        running = self._running
        if running is not None and not running.response_complete:
            # uvicorn tells it to the request that it read last alone: another one is served while that one waits.
            running.disconnected = True
            running.message_event.set()
        super().connection_lost(exc)

    def timeout_keep_alive_handler(self) -> None:
        """A connection is not at rest while an answer is taken: over TLS, closing would soon cut it off."""
        if self._connection.held_bytes():
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
        else:
            super().timeout_keep_alive_handler()

    def pause_writing(self) -> None:
        self._connection.fell_behind()

    def resume_writing(self) -> None:
        self._connection.caught_up()

    def _allow(self, seconds: float) -> None:
        """The connection is closed after that time, unless what it waits for came."""
        self._due = self.loop.call_later(seconds, self.transport.close)

    def _cancel_timer(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None
