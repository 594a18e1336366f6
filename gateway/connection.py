"""The client's connection as the transport sees it: what it has not taken yet, and how far away it is.

uvicorn's protocol hands its transport to the application (`Protocol`). The kernel is told to hold little that it can't
send (TCP_NOTSENT_LOWAT), so that a client that reads slowly shows in the transport's own buffer. The transport tells
when something stays there and when it is empty again: a client that keeps up costs nothing. The buffer may grow to
WRITE_LIMIT_BYTES before the relay stops reading from the upstream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gateway.client_socket import ClientSocket, stream_below
from gateway.head_join import HeadJoin
from tracing.clock import Clock
from tracing.ledger import Ledger

CONNECTION = "tokenline.connection"
"""Key of the ASGI scope that holds the request's Connection."""
WRITE_LIMIT_BYTES = 2**20
_ANY_BYTES = 1
"""A transport over TLS would take 0 for a limit that is always reached."""
TAKING_SECONDS = 0.25
"""Between two looks at whether a client for which writing has paused takes anything."""
TURNS_TO_LOSE = 3
"""Of the loop, until a cut is known: one more over TLS."""
REST_SECONDS = 60.0
"""How long a client may take nothing of what an answer has left behind."""

MAX_HEAD_BYTES = 2**16
HEAD_SECONDS = 30.0
RTT_NS = 1_000_000_000
"""Between two readings of a connection's smoothed round trip."""
MAX_UNREAD_BYTES = 64 * 2**20
MAX_PIPELINED = 64
"""Requests of one connection that may wait for their turn: each costs a hundred times what it takes to send it."""

_FRAMING = (b"content-length", b"transfer-encoding")
_HEAD_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


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
        self._socket = ClientSocket(transport)
        self._below = stream_below(transport)
        self.taken_at = 0.0
        """When the client was last seen to take something while writing paused, by the loop's clock."""
        self._taken = (0, 0)
        self._taking: asyncio.TimerHandle | None = None
        self._rest: asyncio.TimerHandle | None = None
        self._rest_taken = (0, 0)

    def listen(self) -> None:
        """From now on the transport tells; over TLS at once, of what is left of the handshake."""
        if self._below is not None:
            self._below.set_write_buffer_limits(high=_ANY_BYTES, low=0)
        self._transport.set_write_buffer_limits(high=_ANY_BYTES, low=0)

    def drops_writes(self) -> bool:
        """Whether the client has closed its side, over TLS: the transport tells so only once all is flushed."""
        return self._below is not None and (self._below.is_closing() or self._transport.is_closing())

    def held_bytes(self) -> int:
        """What was written and is still in this process."""
        below = self._below.get_write_buffer_size() if self._below is not None else 0
        return self._transport.get_write_buffer_size() + below

    def watch(self, left: Callable[[], None] | None) -> None:
        """From now on `left` is called when the client closes the connection: soon, if it has done so already."""
        self._left = left
        if left is not None and self._is_lost:
            asyncio.get_running_loop().call_soon(self.lost)

    def lost(self) -> None:
        """The client has closed it."""
        self._is_lost = True
        self._transport.forget()
        for timer in (self._taking, self._rest):
            if timer is not None:
                timer.cancel()
        left, self._left = self._left, None
        if left is not None:
            left()

    def begin(self, ledger: Ledger, clock: Clock) -> None:
        """A new answer starts: its head is about to be written, then its body."""
        now_ns = clock.mono_ns() if self.is_behind else 0
        self._charge(now_ns)  # an earlier answer, whose end has not been told yet
        self._ledger, self._clock = ledger, clock
        self._unsent_since_ns = now_ns  # what waits from now on keeps this one
        self._transport.hold()

    def fell_behind(self) -> None:
        """The client has not taken all that was written."""
        self.is_behind = True
        if self._clock is not None:
            self._unsent_since_ns = self._clock.mono_ns()

    def bound(self) -> None:
        """Before a write to a client that is behind: over WRITE_LIMIT_BYTES it waits until a quarter is left."""
        if self._is_lost or self._flow.write_paused:
            return
        if self._transport.get_write_buffer_size() > WRITE_LIMIT_BYTES:
            self._flow.pause_writing()
            self._transport.set_write_buffer_limits(high=WRITE_LIMIT_BYTES, low=WRITE_LIMIT_BYTES // 4)
            self._taken, self.taken_at = self._progress(), asyncio.get_running_loop().time()
            if self._taking is None:
                self._look_whether_it_takes()

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
        if self._is_lost:
            return
        held = self.held_bytes()
        if held and self._rest is None:
            self._await_rest()
        if self._transport.is_closing():
            return
        if ledger.finish >= self._rtt_due_ns:
            self._rtt_ns = self._socket.rtt_ns()
            self._rtt_due_ns = ledger.finish + RTT_NS
        ledger.client_rtt_ns = self._rtt_ns
        ledger.unsent_bytes = self._socket.queued_bytes() + held

    def _progress(self) -> tuple[int, int]:
        """Differs from what it was as soon as the client has taken something."""
        return self._socket.acknowledged_bytes(), self.held_bytes()

    def _look_whether_it_takes(self) -> None:
        """While writing is paused: `taken_at` tells a slow client from one that takes nothing."""
        self._taking = None
        if not self._flow.write_paused:
            return
        loop = asyncio.get_running_loop()
        taken = self._progress()
        if taken != self._taken:
            self._taken, self.taken_at = taken, loop.time()
        self._taking = loop.call_later(TAKING_SECONDS, self._look_whether_it_takes)

    def _await_rest(self) -> None:
        self._rest_taken = self._progress()
        self._rest = asyncio.get_running_loop().call_later(REST_SECONDS, self._look_at_rest)

    def _look_at_rest(self) -> None:
        """What an answer has left behind is thrown away once nobody takes it: a closing connection waits for ever."""
        self._rest = None
        if not self.held_bytes():
            return
        if self._ledger is None and self._progress() == self._rest_taken:
            self._transport.abort()
        else:
            self._await_rest()

    async def cut_off(self) -> None:
        """Throws away what waits for the client, and returns when uvicorn knows, which then misses no answer."""
        self._transport.abort()
        for _ in range(TURNS_TO_LOSE):
            if self._is_lost:
                return
            await asyncio.sleep(0)


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
