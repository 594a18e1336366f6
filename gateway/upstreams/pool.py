"""Connections to one upstream, kept open between requests, and the answers that come over them."""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable
from typing import NamedTuple
from urllib.parse import urlsplit

from gateway.upstreams.addresses import Addresses
from gateway.upstreams.http1 import ConnectFailed, FoundDead, Headers, Http1Connection
from gateway.upstreams.router import Upstream

KEEPALIVE_SECONDS = 30.0


class UpstreamAnswer:
    """An answer from its head on. `close` it: a connection that can serve again goes back to its pool."""

    def __init__(self, connection: Http1Connection, pool: Pool) -> None:
        self.status = connection.status
        self.headers: Headers = connection.headers
        """Names in lower case."""
        self.read = connection.read
        self._connection = connection
        self._pool = pool

    def header(self, name: bytes) -> str:
        """The first header of that name; empty without one."""
        return next((value.decode("latin-1") for found, value in self.headers if found == name), "")

    @property
    def content_type(self) -> str:
        """The media type, without its parameters."""
        return self.header(b"content-type").partition(";")[0].strip().lower()

    def close(self) -> None:
        """The caller has read what it wanted."""
        self._pool.give_back(self._connection)


class _Idle(NamedTuple):
    connection: Http1Connection
    since: float


class Pool:
    """Connections to one upstream: as many as are asked for, at rest for at most KEEPALIVE_SECONDS."""

    def __init__(self, upstream: Upstream) -> None:
        address = urlsplit(upstream.base_url)
        self._origin = f"{address.scheme}://{address.netloc}"
        self.host = address.netloc.encode("ascii" if address.netloc.isascii() else "idna")
        self._socket = upstream.unix_socket
        self._addresses = Addresses(address.hostname or "", address.port or (443 if address.scheme == "https" else 80))
        self._tls = ssl.create_default_context() if address.scheme == "https" else None
        self._loop = asyncio.get_running_loop()
        self._idle: deque[_Idle] = deque()
        self._sweep: asyncio.TimerHandle | None = None
        self._is_closed = False

    def target(self, url: str) -> bytes:
        """A URL as the request line has it."""
        return url[len(self._origin) :].encode()

    def idle(self) -> Http1Connection | None:
        """A connection at rest, the last one used first: what is not needed grows old."""
        while self._idle:
            connection, _ = self._idle.pop()
            if connection.is_reusable:
                return connection
        return None

    async def connect(self) -> Http1Connection:
        """A new connection. Raises ConnectFailed."""
        try:
            if self._socket:
                _, connection = await self._loop.create_unix_connection(Http1Connection, self._socket)
            else:
                reached = await self._addresses.reach()
                _, connection = await self._loop.create_connection(
                    Http1Connection,
                    sock=reached,
                    ssl=self._tls,
                    server_hostname=self._addresses.host if self._tls is not None else None,
                )
        except (OSError, ssl.SSLError, UnicodeError) as error:
            raise ConnectFailed(str(error)) from error
        return connection

    async def ask(
        self, connection: Http1Connection, head: bytes, body: bytes, before_last: Callable[[], None]
    ) -> UpstreamAnswer:
        """One request on a connection that is the caller's until the answer's `close`."""
        try:
            await connection.ask(head, body, before_last)
        except BaseException as error:
            connection.close()
            if isinstance(error, FoundDead):
                # It was the last one used: all others have rested longer, and the next try is not to meet them.
                self._close_idle()
            raise
        return UpstreamAnswer(connection, self)

    def give_back(self, connection: Http1Connection) -> None:
        """An exchange is over: the connection rests, or ends where it can't serve again."""
        if self._is_closed or not connection.is_reusable:
            connection.close()
            return
        connection.rest()
        self._idle.append(_Idle(connection, self._loop.time()))
        if self._sweep is None:
            self._sweep = self._loop.call_later(KEEPALIVE_SECONDS, self._close_old)

    def _close_old(self) -> None:
        self._sweep = None
        eldest = self._loop.time() - KEEPALIVE_SECONDS
        while self._idle and (self._idle[0].since <= eldest or not self._idle[0].connection.is_reusable):
            self._idle.popleft().connection.close()
        if self._idle:
            self._sweep = self._loop.call_at(self._idle[0].since + KEEPALIVE_SECONDS, self._close_old)

    def close(self) -> None:
        """No connection rests here any more."""
        self._is_closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        self._close_idle()

    def _close_idle(self) -> None:
        while self._idle:
            self._idle.pop().connection.close()
