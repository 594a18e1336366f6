"""The intake: relay workers connect to a Unix socket and send frames of ledger records (tracing/wire.py).

Reading goes on only as fast as records are taken, so a flood backs up into the sender's bounded queue, which drops and
counts. A connection that sends anything but frames is closed; the others never notice.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import msgspec

from tracing.ledger import Record
from tracing.wire import FrameReader

READ_BYTES = 2**18
DRAIN_SECONDS = 0.5

log = logging.getLogger("tokenline.observer.intake")

TakeRecords = Callable[[list[Record]], None]


class SocketInUseError(RuntimeError):
    """Another observer serves this state folder."""


class Intake:
    """The server of the intake socket. `open`, then `close` once the workers have ended."""

    def __init__(self, path: Path, take: TakeRecords) -> None:
        self._path = path
        self._take = take
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.bad_frames = 0
        """Connections closed for what they sent."""

    async def open(self) -> None:
        """Listens. A socket file that nobody serves any more is replaced; a served one is an error."""
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _clear_stale(self._path)
        mask = os.umask(0o177)  # the socket is this user's alone
        try:
            self._server = await asyncio.start_unix_server(self._serve, str(self._path), limit=READ_BYTES)
        finally:
            os.umask(mask)

    async def close(self) -> None:
        """Stops listening, reads what workers that are ending still send, and ends every connection."""
        if self._server is None:
            return
        self._server.close()
        if self._connections:
            _, unfinished = await asyncio.wait(self._connections, timeout=DRAIN_SECONDS)
            for task in unfinished:
                task.cancel()
            await asyncio.gather(*unfinished, return_exceptions=True)
        self._path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)
        frames = FrameReader()
        try:
            while data := await reader.read(READ_BYTES):
                for records in frames.feed(data):
                    self._take(records)
                    await asyncio.sleep(0)  # scrapes and spans have their turn between two frames
        except (ValueError, msgspec.MsgspecError) as error:
            self.bad_frames += 1
            log.warning("a connection of the intake socket was closed: %s", error)
        except ConnectionError as error:
            log.info("a worker's connection ended: %s", error)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


def _clear_stale(path: Path) -> None:
    if not path.exists():
        return
    if not stat.S_ISSOCK(path.stat().st_mode):
        raise SocketInUseError(f"{path} exists and is not a socket; move it away or set another TOKENLINE_STATE_DIR")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
        except OSError as error:
            raise SocketInUseError(f"{path} cannot be probed ({error}); is another observer stopped on it?") from error
        else:
            raise SocketInUseError(
                f"another observer already listens on {path}; end it, or give this one a TOKENLINE_STATE_DIR of its own"
            )
