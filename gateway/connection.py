"""The client's connection as the transport sees it: what it has not taken yet, and how far away it is.

`gateway.client_protocol` hands it to the application. The kernel is told to hold little that it can't send
(TCP_NOTSENT_LOWAT), so that a client that reads slowly shows in the transport's own buffer. The transport tells when
something stays there and when it is empty again: a client that keeps up costs nothing. The buffer may grow to
WRITE_LIMIT_BYTES before the relay stops reading from the upstream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from uvicorn.protocols.http.flow_control import FlowControl

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
RTT_NS = 1_000_000_000
"""Between two readings of a connection's smoothed round trip."""


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
