"""Where an upstream's host name leads, and the way to the first of its addresses that takes a connection."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

from aiohappyeyeballs import AddrInfoType, start_connection

KEEP_SECONDS = 10.0
"""A name's addresses are asked for again after that long, and after a failure."""
NEXT_AFTER_SECONDS = 0.25
"""An address that has not answered by then is not waited for alone (RFC 8305)."""


class Addresses:
    """Of one host. `reach` makes a connection; the name is looked up once for all that ask at the same time."""

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self._port = port
        self._loop = asyncio.get_running_loop()
        self._known: Sequence[AddrInfoType] = ()
        self._known_until = 0.0
        self._looking_up = asyncio.Lock()

    async def reach(self) -> socket.socket:
        """A connected socket. Raises OSError, UnicodeError."""
        addresses = self._known if self._loop.time() < self._known_until else await self._look_up()
        try:
            return await start_connection(
                addresses, happy_eyeballs_delay=NEXT_AFTER_SECONDS, interleave=1, loop=self._loop
            )
        except OSError:
            self._known_until = 0.0
            raise

    async def _look_up(self) -> Sequence[AddrInfoType]:
        async with self._looking_up:
            if self._loop.time() >= self._known_until:
                self._known = await self._loop.getaddrinfo(self.host, self._port, type=socket.SOCK_STREAM)
                self._known_until = self._loop.time() + KEEP_SECONDS
            return self._known
