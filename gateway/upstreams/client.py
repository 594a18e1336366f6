"""Requests to upstreams, with the marks of connecting and sending."""

from __future__ import annotations

from collections.abc import Iterable

from gateway.upstreams.attempt import credentials, header_lines
from gateway.upstreams.deadlines import Deadlines, Phase
from gateway.upstreams.pool import Pool, UpstreamAnswer
from gateway.upstreams.router import Upstream
from tracing.clock import Clock
from tracing.ledger import Attempt


class UpstreamClient:
    """Sends requests to any upstream; `post` stamps `connected` and `request_sent` on the attempt."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._pools: dict[str, Pool] = {}

    async def post(
        self, upstream: Upstream, url: str, headers: bytes, body: bytes, attempt: Attempt, deadlines: Deadlines
    ) -> UpstreamAnswer:
        """The answer as soon as its head is there; `headers` are lines with their ends.

        Raises UpstreamFault; the caller limits the time.
        """
        pool = self._pool(upstream)
        deadlines.enter(Phase.CONNECT)
        attempt.connect_start = self._clock.mono_ns()
        connection = pool.idle()
        if connection is not None:
            attempt.reused = True
            attempt.connected = attempt.connect_start
        else:
            connection = await pool.connect()
            attempt.connected = self._clock.mono_ns()
        deadlines.enter(Phase.FIRST_BYTE)

        def sent() -> None:
            # Before the write, not after it: the upstream may have read the request before this process runs again,
            # and no upstream may seem to have received what was not sent yet.
            attempt.request_sent = self._clock.mono_ns()
            deadlines.enter(Phase.FIRST_BYTE)

        head = b"POST %b HTTP/1.1\r\nhost: %b\r\n%bcontent-length: %d\r\n\r\n" % (
            pool.target(url), pool.host, headers, len(body)
        )  # fmt: skip
        return await pool.ask(connection, head, body, sent)

    async def check(self, upstream: Upstream) -> int:
        """Status of its health path. Raises UpstreamFault."""
        pool = self._pool(upstream)
        url = f"{upstream.base_url}{upstream.health_path}"
        head = b"GET %b HTTP/1.1\r\nhost: %b\r\n%b\r\n" % (
            pool.target(url),
            pool.host,
            header_lines(credentials(upstream)),
        )
        connection = pool.idle() or await pool.connect()
        answer = await pool.ask(connection, head, b"", lambda: None)
        answer.close()
        return answer.status

    def _pool(self, upstream: Upstream) -> Pool:
        pool = self._pools.get(upstream.place)
        if pool is None:
            pool = self._pools[upstream.place] = Pool(upstream)
        return pool

    def keep(self, upstreams: Iterable[Upstream]) -> None:
        """Closes the connections at rest of all others. Answers that are under way there come to their ends."""
        places = {upstream.place for upstream in upstreams}
        for place in [place for place in self._pools if place not in places]:
            self._pools.pop(place).close()

    async def close(self) -> None:
        """Closes every connection that is at rest."""
        for pool in self._pools.values():
            pool.close()
