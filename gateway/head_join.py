"""An answer's head waits for the first piece of its body, so that both leave in one write and one packet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

MAX_JOINED_BYTES = 2**16
"""A larger piece is not copied for it: it follows in a write of its own."""


class HeadJoin:
    """Stands before uvicorn's transport. Between `hold` and the head it costs a call, otherwise nothing."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head = b""
        self.write: Callable[[bytes], None] = transport.write
        # Asked for each piece: not by way of __getattr__.
        self.get_write_buffer_size = transport.get_write_buffer_size
        self.is_closing = transport.is_closing

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def hold(self) -> None:
        """A head is about to be written, and a piece of its body right after it."""
        self.write = self._write_head

    def _write_head(self, data: bytes) -> None:
        if data.startswith(b"HTTP/"):
            self._head = data
            self.write = self._write_first
        else:  # no head after all: uvicorn refused it
            self.write = self._transport.write
            self._transport.write(data)

    def _write_first(self, data: bytes) -> None:
        head, self._head = self._head, b""
        self.write = self._transport.write
        if len(data) > MAX_JOINED_BYTES:
            self._transport.write(head)
            self._transport.write(data)
        else:
            self._transport.write(head + data)

    def release(self) -> None:
        """The answer is complete: a head that has no body (HEAD) waits no more."""
        if self._head:
            self._write_first(b"")

    def forget(self) -> None:
        """The client has gone: a head that waits for its body is nobody's, and the transport takes no more."""
        self._head = b""
        self.write = self._transport.write

    def close(self) -> None:
        """Closes the transport once all is written, a head without a body too."""
        self.release()
        self._transport.close()
