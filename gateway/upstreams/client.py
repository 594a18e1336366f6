"""Connections to upstreams: one pooled aiohttp session each, with the marks of connecting and sending."""

from __future__ import annotations

from typing import Any, NamedTuple

import aiohttp
from aiohttp import payload
from aiohttp.abc import AbstractStreamWriter

from gateway.upstreams.attempt import credentials
from gateway.upstreams.deadlines import Deadlines, Phase
from gateway.upstreams.router import Upstream
from tracing.clock import Clock
from tracing.ledger import Attempt

KEEPALIVE_SECONDS = 30
READ_BUFFER_BYTES = 2**20
"""aiohttp stops reading from the upstream when this much has not been forwarded yet."""
PIECE_BYTES = 2**16
"""A larger body goes out in pieces, each waiting for room in the socket."""


class UpstreamClient:
    """Sends requests to any upstream; `post` stamps `connected` and `request_sent` on the attempt."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._sessions: dict[str, aiohttp.ClientSession] = {}

    async def post(
        self,
        upstream: Upstream,
        url: str,
        headers: dict[str, str],
        body: bytes,
        attempt: Attempt,
        deadlines: Deadlines,
    ) -> aiohttp.ClientResponse:
        """The answer as soon as its headers are there. Raises aiohttp.ClientError; the caller limits the time."""
        sending = _Sending(attempt, deadlines)
        deadlines.enter(Phase.CONNECT)
        attempt.connect_start = self._clock.mono_ns()
        return await self._session(upstream).post(
            url,
            data=_StampedBody(body, sending, self._clock),
            headers=headers,
            trace_request_ctx=sending,
            allow_redirects=False,
        )

    async def check(self, upstream: Upstream) -> int:
        """Status of its health path. Raises aiohttp.ClientError or OSError."""
        headers = credentials(upstream)
        url = f"{upstream.base_url}{upstream.health_path}"
        async with self._session(upstream).get(url, headers=headers, allow_redirects=False) as response:
            return response.status

    def _session(self, upstream: Upstream) -> aiohttp.ClientSession:
        session = self._sessions.get(upstream.name)
        if session is None:
            session = self._sessions[upstream.name] = self._open(upstream)
        return session

    def _open(self, upstream: Upstream) -> aiohttp.ClientSession:
        options: dict[str, float] = {"keepalive_timeout": KEEPALIVE_SECONDS, "limit": 0}
        connector: aiohttp.BaseConnector = (
            aiohttp.UnixConnector(upstream.unix_socket, **options)  # type: ignore[arg-type]
            if upstream.unix_socket
            else aiohttp.TCPConnector(**options)  # type: ignore[arg-type]
        )
        return aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=None, sock_read=None),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            read_bufsize=READ_BUFFER_BYTES,
            skip_auto_headers={"User-Agent", "Accept", "Accept-Encoding"},
            trace_configs=[self._marks()],
        )

    def _marks(self) -> aiohttp.TraceConfig:
        async def opened(_session: object, context: Any, _params: object) -> None:
            sending: _Sending | None = context.trace_request_ctx
            if sending is not None:  # a health check has none
                sending.attempt.connected = self._clock.mono_ns()
                sending.deadlines.enter(Phase.FIRST_BYTE)

        async def reused(_session: object, context: Any, _params: object) -> None:
            sending: _Sending | None = context.trace_request_ctx
            if sending is not None:
                sending.attempt.reused = True
                sending.attempt.connected = sending.attempt.connect_start
                sending.deadlines.enter(Phase.FIRST_BYTE)

        config = aiohttp.TraceConfig()
        config.on_connection_create_end.append(opened)
        config.on_connection_reuseconn.append(reused)
        return config

    async def close(self) -> None:
        """Closes every connection."""
        for session in self._sessions.values():
            await session.close()


class _Sending(NamedTuple):
    """What the session's callbacks write to."""

    attempt: Attempt
    deadlines: Deadlines


class _StampedBody(payload.BytesPayload):
    """A body that stamps `request_sent` as its last piece goes to the transport.

    Before that write, not after it: the upstream may have read the request before this process runs again, and no
    upstream may seem to have received what was not sent yet.
    """

    def __init__(self, body: bytes, sending: _Sending, clock: Clock) -> None:
        super().__init__(body, content_type="application/json")
        self._sending = sending
        self._clock = clock

    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        body = self._value
        last = max(0, (len(body) - 1) // PIECE_BYTES * PIECE_BYTES)
        for start in range(0, last, PIECE_BYTES):
            await writer.write(body[start : start + PIECE_BYTES])
        self._sending.attempt.request_sent = self._clock.mono_ns()
        self._sending.deadlines.enter(Phase.FIRST_BYTE)
        await writer.write(body[last:] if last else body)
