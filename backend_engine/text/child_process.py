"""One text process as the frontend sees it: started, spoken to, and started again when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Literal

import msgspec
import zmq
import zmq.asyncio

from backend_engine.text.tokenizer import TextError
from backend_engine.text.wire import Broken, Loaded, Start, encode

log = logging.getLogger(__name__)

Kind = Literal["tokenize", "detokenize"]

FIRST_DELAY_SECONDS = 0.1
MOST_DELAY_SECONDS = 10.0
PROVEN_SECONDS = 30.0
"""One that lived this long had no trouble of its own; its death starts the delays anew."""
TERMINATE_SECONDS = 2.0
STUCK_SECONDS = 60.0
"""One that owes an answer and says nothing for so long is taken for dead."""


class ChildProcess:
    """Runs `python -m backend_engine.text.<kind>_process`. Each start has sockets of its own, so that nothing meant for
    one that died ever reaches the next.

    `queued` bounds what may be under way to it; the owner keeps to that, so no send waits. `owes`: whether it has not
    answered all that it was sent.
    """

    def __init__(
        self,
        kind: Kind,
        number: int,
        folder: Path,
        queued: int,
        decode: Callable[[bytes], msgspec.Struct],
        owes: Callable[[], bool],
        stuck_seconds: float = STUCK_SECONDS,
    ) -> None:
        self._kind = kind
        self._prefix = f"{kind[0]}{number}"
        self._folder = folder
        self._queued = queued
        self._decode = decode
        self._owes = owes
        self._stuck_seconds = stuck_seconds
        self._last_seen = 0.0
        """When it last said something, or owed nothing; on the event loop's clock."""
        self._context: zmq.asyncio.Context | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._starts = 0
        self._was_ever_loaded = False
        self.loaded: Loaded | None = None
        """What it said of itself; None while it can't be spoken to."""

    def send(self, data: bytes) -> None:
        """Hands a message over at once, in order. Only while `loaded`."""
        assert self._socket is not None
        self._socket.send(data)

    async def run(
        self,
        start: Callable[[], Awaitable[Start]],
        on_loaded: Callable[[], None],
        on_message: Callable[[msgspec.Struct], None],
        on_lost: Callable[[], None],
    ) -> None:
        """Keeps one alive until cancelled. Raises TextError when the first one can't load."""
        delay_seconds = FIRST_DELAY_SECONDS
        while True:
            began = asyncio.get_running_loop().time()
            why = await self._live(start, on_loaded, on_message)
            was_loaded, self.loaded = self.loaded is not None, None
            if not self._was_ever_loaded:
                raise TextError(why)
            if was_loaded:
                on_lost()
            if asyncio.get_running_loop().time() - began > PROVEN_SECONDS:
                delay_seconds = FIRST_DELAY_SECONDS
            log.error("the engine's %sr ended (%s) and is started again in %.1f s", self._kind, why, delay_seconds)
            await asyncio.sleep(delay_seconds)
            delay_seconds = min(2 * delay_seconds, MOST_DELAY_SECONDS)

    async def _live(
        self,
        start: Callable[[], Awaitable[Start]],
        on_loaded: Callable[[], None],
        on_message: Callable[[msgspec.Struct], None],
    ) -> str:
        """One life, from start to death; returns the cause of death."""
        self._starts += 1
        inbox, outbox = (f"ipc://{self._folder / f'{self._prefix}{self._starts}{end}'}" for end in "io")
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.set_hwm(self._queued)
        answers = self._context.socket(zmq.PULL)
        answers.set_hwm(self._queued)
        process: asyncio.subprocess.Process | None = None
        reading: asyncio.Task[str] | None = None
        try:
            self._socket.bind(inbox)
            answers.bind(outbox)
            process = await self._spawn(inbox, outbox)
            self._socket.send(encode(await start()))
            reading = asyncio.create_task(self._read(answers, on_loaded, on_message), name=f"{self._kind} answers")
            ending = asyncio.create_task(process.wait(), name=f"{self._kind} process")
            while not reading.done() and not ending.done():
                await asyncio.wait(
                    [reading, ending], timeout=self._stuck_seconds / 4, return_when=asyncio.FIRST_COMPLETED
                )
                if self._is_stuck():
                    return f"it said nothing for {self._stuck_seconds:g} s"
            if not reading.done() and self.loaded is None:
                await asyncio.wait([reading], timeout=0.5)  # its last words may still be on their way
            if reading.done():
                return reading.result()
            return f"exit status {process.returncode}"
        finally:
            if reading is not None:
                reading.cancel()
                await asyncio.wait([reading])
            if process is not None:
                await _end(process)
            self._context.destroy(linger=0)
            for address in (inbox, outbox):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(address.removeprefix("ipc://"))

    def _is_stuck(self) -> bool:
        now = asyncio.get_running_loop().time()
        if self.loaded is None or not self._owes():
            self._last_seen = now
        return now - self._last_seen > self._stuck_seconds

    async def _spawn(self, inbox: str, outbox: str) -> asyncio.subprocess.Process:
        settings = str(self._folder / "settings.json")
        arguments = ("--settings", settings, "--inbox", inbox, "--outbox", outbox)
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", f"backend_engine.text.{self._kind}_process", *arguments,
            stdin=asyncio.subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    async def _read(
        self,
        answers: zmq.asyncio.Socket,
        on_loaded: Callable[[], None],
        on_message: Callable[[msgspec.Struct], None],
    ) -> str:
        """Until it says that it can't work; returns why."""
        while True:
            message = self._decode(await answers.recv())
            self._last_seen = asyncio.get_running_loop().time()
            if isinstance(message, Broken):
                return message.message
            if isinstance(message, Loaded):
                self.loaded = message
                self._was_ever_loaded = True
                log.info(
                    "the engine's %sr is ready: %.1f s of loading, %.0f MiB",
                    self._kind,
                    message.load_ns / 1e9,
                    message.memory_bytes / 2**20,
                )
                on_loaded()
            else:
                on_message(message)


async def _end(process: asyncio.subprocess.Process) -> None:
    """It has nothing to put in order."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), TERMINATE_SECONDS)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
