"""The client's connection as the transport sees it: what it has not taken yet, and how far away it is.

uvicorn's protocol hands its transport to the application (`Protocol`). The kernel is told to hold little that it can't
send (TCP_NOTSENT_LOWAT), so that a client that reads slowly shows in the transport's own buffer. The transport tells
when something stays there and when it is empty again: a client that keeps up costs nothing. The buffer may grow to
WRITE_LIMIT_BYTES before the relay stops reading from the upstream.
"""

from __future__ import annotations

import array
import asyncio
import fcntl
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gateway.head_join import HeadJoin
from tracing.clock import Clock
from tracing.ledger import Ledger

CONNECTION = "tokenline.connection"
"""Key of the ASGI scope that holds the request's Connection."""
WRITE_LIMIT_BYTES = 2**20
_ANY_BYTES = 1
"""A transport over TLS would take 0 for a limit that is always reached."""
NOTSENT_LOWAT_BYTES = 2**14

MAX_HEAD_BYTES = 2**16
HEAD_SECONDS = 30.0
RTT_NS = 1_000_000_000
"""Between two readings of a connection's smoothed round trip."""
MAX_UNREAD_BYTES = 64 * 2**20
MAX_PIPELINED = 64
"""Requests of one connection that may wait for their turn: each costs a hundred times what it takes to send it."""

_FRAMING = (b"content-length", b"transfer-encoding")
_HEAD_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_TCP_NOTSENT_LOWAT = 25
_SIOCOUTQ = 0x5411
_TCP_INFO_BYTES = 76
_RTT = struct.Struct("I")
_RTT_OFFSET = 68  # tcpi_rtt of struct tcp_info, µs (linux/tcp.h)


class Connection:
    """One client's connection; serves the requests on it in turn."""

    def __init__(self, transport: HeadJoin, flow: FlowControl) -> None:
        self._transport = transport
        self._flow = flow
        self._ledger: Ledger | None = None
        """Of the answer that is being written."""
        self._clock: Clock | None = None
        self._unsent_since_ns = 0
        self.is_behind = False
        """Something that was written has not been taken."""
        self._rtt_ns = 0
        self._rtt_due_ns = 0
        self.has_whole_body = False
        """Nothing is missing of the message that was read last: waiting for a body needs no time limit."""
        self._left: Callable[[], None] | None = None
        self._is_lost = False
        self._socket = _tcp_socket(transport)
        self._queued = array.array("i", [0])
        transport.set_write_buffer_limits(high=_ANY_BYTES, low=0)
        if self._socket is not None:
            self._socket.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, NOTSENT_LOWAT_BYTES)

    def watch(self, left: Callable[[], None] | None) -> None:
        """From now on `left` is called when the client closes the connection: soon, if it has done so already."""
        self._left = left
        if left is not None and self._is_lost:
            asyncio.get_running_loop().call_soon(self.lost)

    def lost(self) -> None:
        """The client has closed it."""
        self._is_lost = True
        left, self._left = self._left, None
        if left is not None:
            left()

    def begin(self, ledger: Ledger, clock: Clock) -> None:
        """A new answer starts: its head is about to be written, then its body."""
        self._ledger, self._clock = ledger, clock
        if self.is_behind:  # with an earlier answer; what waits from now on keeps this one
            self._unsent_since_ns = clock.mono_ns()
        self._transport.hold()

    def fell_behind(self) -> None:
        """The client has not taken all that was written."""
        self.is_behind = True
        if self._clock is not None:
            self._unsent_since_ns = self._clock.mono_ns()

    def bound(self) -> None:
        """Before a write to a client that is behind: over WRITE_LIMIT_BYTES it waits until a quarter is left."""
        if self._transport.get_write_buffer_size() > WRITE_LIMIT_BYTES and not self._flow.write_paused:
            self._flow.pause_writing()
            self._transport.set_write_buffer_limits(high=WRITE_LIMIT_BYTES, low=WRITE_LIMIT_BYTES // 4)

    def caught_up(self) -> None:
        """The client has taken what was written; after `bound`, all but a quarter."""
        self.is_behind = False
        if self._clock is not None:
            self._charge(self._clock.mono_ns())
        if self._flow.write_paused:
            self._flow.resume_writing()
            self._transport.set_write_buffer_limits(high=_ANY_BYTES, low=0)

    def _charge(self, now_ns: int) -> None:
        """The time in which something was unsent is the client's, up to the answer's last byte."""
        ledger, since_ns = self._ledger, self._unsent_since_ns
        if ledger is not None and since_ns:
            ledger.backpressure_ns += max(0, (ledger.finish or now_ns) - since_ns)
        self._unsent_since_ns = 0

    def complete(self) -> None:
        """The answer's last piece has been written."""
        self._transport.release()

    def end(self, ledger: Ledger) -> None:
        """After the last byte: what is still unsent, and the connection's round trip. Unknown stays 0."""
        if self._ledger is ledger:
            self._charge(ledger.finish)
            self._ledger = None
        if self._socket is None or self._transport.is_closing():
            return
        try:
            if ledger.finish >= self._rtt_due_ns:
                information = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
                self._rtt_ns = _RTT.unpack_from(information, _RTT_OFFSET)[0] * 1000
                self._rtt_due_ns = ledger.finish + RTT_NS
            fcntl.ioctl(self._socket.fileno(), _SIOCOUTQ, self._queued)
        except OSError:
            return
        ledger.client_rtt_ns = self._rtt_ns
        ledger.unsent_bytes = self._queued[0] + self._transport.get_write_buffer_size()

    def abort(self) -> None:
        """Cuts the client off: what waits for it is thrown away."""
        self._transport.abort()


def _tcp_socket(transport: HeadJoin) -> Any:
    """The TCP socket below, None where there is none or where the kernel can't be asked about it."""
    found = transport.get_extra_info("socket") if sys.platform == "linux" else None
    return found if found is not None and found.family in (socket.AF_INET, socket.AF_INET6) else None


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
        self._connection.lost()
        running = self._running
        if running is not None and not running.response_complete:
            # uvicorn tells it to the request that it read last alone: another one is served while that one waits.
            running.disconnected = True
            running.message_event.set()
        super().connection_lost(exc)

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
