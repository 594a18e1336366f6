"""Reporting to the observer: records leave over a Unix socket, a few milliseconds at a time, and never block.

While the observer is away its records wait in a bounded queue; what does not fit is dropped and counted.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from pathlib import Path

from tracing.ledger import Admitted, Closed, FirstToken, Ledger, Record, encode_record
from tracing.wire import frame

MAX_WAITING_RECORDS = 20_000
"""Kept while the observer is away: some minutes of a busy worker."""
MAX_UNSENT_BYTES = 8 * 2**20
"""Written to the socket but not yet taken by the observer."""
MAX_FRAME_RECORDS = 500
FLUSH_SECONDS = 0.02
"""Records wait so long for company. Sent at once, they would be sent before the request itself goes to its upstream."""
RECONNECT_SECONDS = 0.2
HEARTBEAT_SECONDS = 1.0

log = logging.getLogger("tokenline.reporter")


class Reporter:
    """Sends ledger records. `state` makes the once-a-second record of the worker itself."""

    def __init__(self, socket: Path, state: Callable[[int], Record]) -> None:
        self._socket = socket
        self._state = state
        self._waiting: deque[bytes] = deque()
        self._transport: asyncio.WriteTransport | None = None
        self._flush_due = False
        self.dropped = 0
        """Closed records lost; a request is counted once however many of its records are."""

    def admitted(self, record: Admitted) -> None:
        """A request has routed, and waits."""
        self._put(record)

    def first_token(self, record: FirstToken) -> None:
        """TTFT is known."""
        self._put(record)

    def closed(self, ledger: Ledger) -> None:
        """A request has ended; its ledger is not touched any more."""
        if not self._put(Closed(ledger)):
            self.dropped += 1

    def _put(self, record: Record) -> bool:
        """False where it is lost. Encoded at once, while it is in the processor's cache and so that nothing is kept."""
        if len(self._waiting) >= MAX_WAITING_RECORDS:
            return False
        try:
            self._waiting.append(encode_record(record))
        except (OverflowError, TypeError, ValueError) as error:
            log.error("a %s record can't be encoded: %s", type(record).__name__, error)
            return False
        if self._transport is not None and not self._flush_due:
            self._flush_due = True
            asyncio.get_running_loop().call_later(FLUSH_SECONDS, self._flush)
        return True

    def _flush(self) -> None:
        """Hands what waits to the socket, as long as the observer keeps up."""
        self._flush_due = False
        while (
            self._waiting
            and (transport := self._transport) is not None
            and not transport.is_closing()
            and transport.get_write_buffer_size() < MAX_UNSENT_BYTES
        ):
            count = min(len(self._waiting), MAX_FRAME_RECORDS)
            transport.write(frame([self._waiting.popleft() for _ in range(count)]))

    async def run(self) -> None:
        """Keeps the connection and sends the worker's state every second, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection = _Connection()
                transport, _ = await loop.create_unix_connection(lambda: connection, str(self._socket))  # noqa: B023
            except OSError:
                await asyncio.sleep(RECONNECT_SECONDS)
                continue
            self._transport = transport
            try:
                await self._beat(connection, transport)
            finally:
                self._transport = None
                self._flush_on_close(transport)

    async def _beat(self, connection: _Connection, transport: asyncio.WriteTransport) -> None:
        while not connection.lost.is_set():
            if transport.get_write_buffer_size() < MAX_UNSENT_BYTES:
                transport.write(frame([encode_record(self._state(self.dropped))]))
            self._flush()
            try:
                async with asyncio.timeout(HEARTBEAT_SECONDS):
                    await connection.lost.wait()
            except TimeoutError:
                continue

    def _flush_on_close(self, transport: asyncio.WriteTransport) -> None:
        if not transport.is_closing():
            self._transport = transport
            self._flush()
            self._transport = None
            transport.close()


class _Connection(asyncio.Protocol):
    """Notices that the observer has gone."""

    def __init__(self) -> None:
        self.lost = asyncio.Event()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()
