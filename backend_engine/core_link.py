"""The two queues between frontend and core: msgpack over ZeroMQ, on Unix sockets that the frontend binds."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

import zmq
import zmq.asyncio

from backend_engine.core.messages import ToCore, encode


class CoreLink(Protocol):
    """How the frontend reaches the core."""

    def send(self, message: ToCore) -> None:
        """Hands a message over at once, in order; never waits."""


class ZmqLink:
    """PUSH to the core, PULL from it.

    The queue to the core is as long as what the frontend lets in: `max_in_flight` answers, each with a Submit, at most
    one Abort and one Mask at a time. It is sized for more: a send never finds it full while the core lives. The queue
    from the core holds what a step said, and is read by one task that does little else.
    """

    def __init__(self, inbox: str, outbox: str, max_in_flight: int) -> None:
        self._context = zmq.asyncio.Context()
        self._to_core = self._context.socket(zmq.PUSH)
        self._to_core.setsockopt(zmq.SNDHWM, 4 * max_in_flight + 16)
        self._to_core.bind(inbox)
        self._from_core = self._context.socket(zmq.PULL)
        self._from_core.bind(outbox)

    def send(self, message: ToCore) -> None:
        """Sends now if the core is connected, else as soon as it is; the order is kept."""
        self._to_core.send(encode(message))

    async def messages(self) -> AsyncIterator[bytes]:
        """What the core says, in its order, as it comes."""
        while True:
            yield await self._from_core.recv()

    def close(self) -> None:
        """Drops what was not sent."""
        self._context.destroy(linger=0)
