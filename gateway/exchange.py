"""One request and its answer: the ledger that is written, the client that may leave, the bytes that go out."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, MutableMapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from gateway.connection import CONNECTION, Connection
from gateway.lag import LoopLag
from gateway.limits.standing import RATELIMIT
from gateway.surfaces.shapes import OPENAI_ERRORS, ErrorShape
from protocol.errors import ApiError
from protocol.ids import (
    accepted_client_id,
    format_traceparent,
    new_request_id,
    new_span_id,
    new_trace_id,
    parse_traceparent,
)
from tracing.clock import Clock
from tracing.ledger import Ledger, Outcome

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

OUTCOMES = {401: Outcome.AUTH_ERROR, 403: Outcome.AUTH_ERROR, 429: Outcome.RATE_LIMITED, 504: Outcome.UPSTREAM_TIMEOUT}
"""Outcomes of statuses; other 4xx are the client's, other 5xx the upstream's unless the gateway says otherwise."""


FAREWELL_SECONDS = 5.0
"""For an error, or an answer of the gateway's own, to be taken by a client that may not be reading."""
_KEY_IN_PATH = re.compile(r"sk-[A-Za-z0-9_-]+")


class ClientLeft(Exception):
    """The client closed its connection before the answer was complete."""


class ClientTooSlow(Exception):
    """The client took nothing of its answer for server.client_write_timeout_seconds, or FAREWELL_SECONDS."""


class Exchange:
    """Wraps an ASGI request. Everything that leaves goes through `send`, so that ids and marks are never missed."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, clock: Clock, worker: int, lag: LoopLag) -> None:
        self.clock = clock
        self._lag = lag
        self._connection: Connection = scope[CONNECTION]
        self.scope = scope
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.started = False
        self.errors: ErrorShape = OPENAI_ERRORS
        """How the client reads an error, now."""
        self.hint: str | None = None
        """The base_url that the client should have used."""
        self.more_headers: Headers = []
        """x-ratelimit-* of the answer, whatever it becomes."""
        self._receive = receive
        self._send = send
        self.ledger = open_ledger(scope, self.headers, clock, worker)
        self._woke_ns = self.ledger.ingress

    async def body(self, limit: int, idle_seconds: float) -> bytes:
        """The whole request body.

        Raises ApiError 413 once it is over `limit` bytes and 408 when nothing of it came for `idle_seconds`, ClientLeft
        if it is cut short.
        """
        declared = self.headers.get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > limit:
            raise _too_large(int(declared), limit)
        pieces: list[bytes] = []
        size = 0
        while True:
            if self._connection.has_whole_body:
                message = await self._receive()
            else:
                try:
                    async with asyncio.timeout(idle_seconds):
                        message = await self._receive()
                except TimeoutError:
                    raise _stalled(size, idle_seconds) from None
            if message["type"] == "http.disconnect":
                self.ledger.client_gone = self.clock.mono_ns()
                raise ClientLeft
            piece = message.get("body", b"")
            size += len(piece)
            if size > limit:
                raise _too_large(size, limit)
            pieces.append(piece)
            if not message.get("more_body", False):
                self.ledger.request_bytes = size
                self.woke(self.clock.mono_ns())
                return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While inside, a client that leaves ends the block with ClientLeft, whatever it is waiting for."""
        task = asyncio.current_task()
        assert task is not None

        def left() -> None:
            if not self.ledger.finish:
                self.ledger.client_gone = self.clock.mono_ns()
                task.cancel()

        self._connection.watch(left)
        try:
            yield
        except asyncio.CancelledError:
            if not self.ledger.client_gone:
                raise
            task.uncancel()
            raise ClientLeft from None
        finally:
            self._connection.watch(None)

    def woke(self, now_ns: int) -> None:
        """The request's turn came at `now_ns`: notes how late the loop was with it, no moment of it twice."""
        since_ns, self._woke_ns = self._woke_ns, now_ns
        self.ledger.loop_lag_ns += min(self._lag.overdue_ns(now_ns), now_ns - since_ns)

    async def start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Sends the status line and headers, ours added."""
        self.started = True
        self.ledger.status = status
        self._connection.begin(self.ledger, self.clock)
        if self.more_headers:  # this gateway's limits, not an upstream's
            headers = [header for header in headers if not header[0].startswith(RATELIMIT)]
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, *self._own_headers()]})

    async def write(self, body: bytes, *, last: bool = False) -> None:
        """Sends a piece of the body; `last` ends the answer."""
        ledger, connection = self.ledger, self._connection
        if connection.drops_writes():
            await connection.cut_off()  # where the request is watched, it ends here
        if connection.is_behind:
            connection.bound()
        await self._send({"type": "http.response.body", "body": body, "more_body": not last})
        ledger.response_bytes += len(body)
        if last:
            self._connection.complete()
            ledger.finish = self.clock.mono_ns()

    def taken_at(self) -> float:
        """When the client was last seen to take something while it kept the answer waiting, by the loop's clock."""
        return self._connection.taken_at

    async def answer_json(self, body: bytes, status: int = 200, headers: Headers | None = None) -> None:
        """Sends a whole JSON answer. Raises ClientTooSlow when the client takes nothing of what waits before it."""
        length = (b"content-length", b"%d" % len(body))
        try:
            async with self._farewell():
                await self.start(status, [(b"content-type", b"application/json"), length, *(headers or ())])
                await self.write(body, last=True)
        except TimeoutError:
            raise ClientTooSlow from None

    async def fail(self, error: ApiError) -> None:
        """Answers with an error; once the answer has begun, as one event and the end."""
        ledger = self.ledger
        ledger.error_code = error.code
        try:
            async with self._farewell():
                if self.started:
                    await self.write(self.errors.event(error, ledger.request_id), last=True)
                else:
                    body = self.errors.body(error, ledger.request_id)
                    await self.answer_json(body, error.status, error.headers())
        except (TimeoutError, ClientTooSlow):
            await self.abort()

    @asynccontextmanager
    async def _farewell(self) -> AsyncIterator[None]:
        """Raises TimeoutError once the client has taken nothing for FAREWELL_SECONDS."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(FAREWELL_SECONDS) as limit:
            timer: asyncio.TimerHandle

            def look() -> None:
                nonlocal timer
                taken_until = self._connection.taken_at + FAREWELL_SECONDS
                if taken_until > (limit.when() or 0.0):
                    limit.reschedule(taken_until)
                timer = loop.call_later(FAREWELL_SECONDS / 4, look)

            timer = loop.call_later(FAREWELL_SECONDS / 4, look)
            try:
                yield
            finally:
                timer.cancel()

    async def abort(self) -> None:
        """Cuts the client off; what it had not taken by now is charged to it."""
        await self._connection.cut_off()

    async def send(self, message: Message) -> None:
        """ASGI send: adds the ids to the headers, counts bytes, stamps `finish`."""
        if message["type"] == "http.response.start":
            await self.start(message["status"], message.get("headers", ()))
        else:
            await self.write(message.get("body", b""), last=not message.get("more_body", False))

    def _own_headers(self) -> Headers:
        ledger = self.ledger
        hint = [(b"x-tokenline-hint", f"base_url={self.hint}".encode())] if self.hint else []
        if self.errors.id_header is not None:
            hint.append((self.errors.id_header, ledger.request_id.encode()))
        return [
            *hint,
            *self.more_headers,
            (b"x-request-id", (ledger.client_request_id or ledger.request_id).encode()),
            (b"x-tokenline-request-id", ledger.request_id.encode()),
            (b"traceparent", format_traceparent(ledger.trace_id, ledger.span_id).encode()),
        ]

    def close(self) -> Ledger:
        """The finished ledger; a request that sent no last byte ends now."""
        ledger = self.ledger
        if not ledger.finish:
            ledger.finish = self.clock.mono_ns()
        self._connection.end(ledger)
        return ledger


def open_ledger(scope: Scope, headers: dict[bytes, bytes], clock: Clock, worker: int) -> Ledger:
    """A ledger with its ids: the caller's trace is continued, an invalid traceparent starts a new one."""
    ingress = clock.mono_ns()
    caller = parse_traceparent(headers.get(b"traceparent", b"").decode("latin-1"))
    client_id = headers.get(b"x-request-id")
    return Ledger(
        request_id=new_request_id(),
        trace_id=caller[0] if caller else new_trace_id(),
        span_id=new_span_id(),
        wall_ns=clock.wall_ns(),
        ingress=ingress,
        parent_span_id=caller[1] if caller else None,
        tracestate=headers.get(b"tracestate", b"").decode("latin-1") or None if caller else None,
        client_request_id=accepted_client_id(client_id.decode("latin-1")) if client_id else None,
        worker=worker,
        method=scope["method"],
        path=without_keys(scope["path"])[:256],
    )


def without_keys(path: str) -> str:
    """A path as it may be written down: people paste keys into URLs."""
    return _KEY_IN_PATH.sub("sk-…", path) if "sk-" in path else path


def outcome_of(status: int) -> Outcome:
    """What a final status says about how the request ended."""
    if status in OUTCOMES:
        return OUTCOMES[status]
    if status < 400:
        return Outcome.OK
    return Outcome.CLIENT_ERROR if status < 500 else Outcome.UPSTREAM_ERROR


def _stalled(size: int, idle_seconds: float) -> ApiError:
    text = f"Nothing of the body came for {idle_seconds:g} s (server.receive_timeout_seconds); {size} bytes are here."
    return ApiError(408, "request_timeout", text, extra_headers=(("connection", "close"),))


def _too_large(size: int, limit: int) -> ApiError:
    return ApiError(
        413,
        "body_too_large",
        f"The body has {size} bytes or more; the limit (server.max_body_bytes) is {limit}.",
    )
