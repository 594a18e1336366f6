"""Reloading the configuration, as seen from the ops listener: whoever asks for it hears what came of it.

The supervisor reads and checks the file, tells every process, and then says how it went (`told`). It may have been
asked by a signal, too.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

import msgspec
from fastapi import APIRouter, HTTPException
from fastapi.responses import JSONResponse

from settings.feed import Message

ANSWER_SECONDS = 8.0
MAX_WAITING = 32


class Result(msgspec.Struct, frozen=True):
    """How a reload went. Names are dotted, such as `upstreams.vllm` or `server.port`."""

    result: str
    """ok, or failed: then nothing has changed."""
    error: str | None = None
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    needs_restart: tuple[str, ...] = ()
    """Different in the new configuration, and not taken while processes run."""
    late: tuple[str, ...] = ()
    """Processes that had not confirmed it in time; they take it when they can."""
    asked: tuple[int, ...] = ()
    """Who of those that asked this answers."""


class Reloads:
    """Hands wishes to the supervisor and its answers back. `counted` is told of every reload."""

    def __init__(self, ask: Callable[[Message], None], counted: Callable[[bool], None]) -> None:
        self._ask = ask
        self._counted = counted
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Result]] = {}

    async def reload(self) -> Result:
        """Asks for a reload and waits for its end. Raises TimeoutError, OverflowError with too many who wait."""
        if len(self._waiting) >= MAX_WAITING:
            raise OverflowError
        number = next(self._numbers)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._ask({"reload": number})
            async with asyncio.timeout(ANSWER_SECONDS):
                result: Result = await future
                return result
        finally:
            del self._waiting[number]

    def told(self, message: Message) -> None:
        """What the supervisor says of a reload, whoever asked for it."""
        if "reloaded" not in message:
            return
        result = msgspec.convert(message["reloaded"], Result)
        self._counted(result.result == "ok")
        for number in result.asked:
            waiting = self._waiting.get(number)
            if waiting is not None and not waiting.done():
                waiting.set_result(result)


def reload_router(reloads: Reloads) -> APIRouter:
    """`POST /reload`."""
    router = APIRouter()

    @router.post("/reload")
    async def reload() -> JSONResponse:
        """Reads the configuration again. 422 where it can't be used: then the one before stays in force."""
        try:
            result = await reloads.reload()
        except (TimeoutError, OverflowError):
            raise HTTPException(503, "the supervisor did not answer in time; its log says what it does") from None
        if result.result != "ok":
            raise HTTPException(422, f"nothing was changed: {result.error}")
        fields = msgspec.structs.asdict(result)
        del fields["asked"], fields["error"]
        return JSONResponse(msgspec.to_builtins(fields))

    return router
