"""Asking Redis from the event loop: what is asked in one turn goes out together, and nobody waits longer than allowed.

One batch is under way at a time, so a busy worker's batches grow and its round trips do not. An answer that is late or
lost opens the breaker: everybody who waits is told at once, and nothing is sent until a probe, once a second, succeeds.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError

MAX_WAITING = 10_000
"""Commands that wait for the batch before them."""
PROBE_SECONDS = 1.0
MAX_CONNECTIONS = 4
SLICES = 8

T = TypeVar("T")

log = logging.getLogger("tokenline.limits")


class LinkDown(Exception):
    """Redis did not answer, or not in time. `may_be_done`: it has the command, and may still do it when it thaws."""

    def __init__(self, reason: str, *, may_be_done: bool = False) -> None:
        super().__init__(reason)
        self.may_be_done = may_be_done


class Script:
    """A Lua script and the name that Redis knows it by."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


_Command = tuple[Script, tuple[Any, ...], "asyncio.Future[Any]"]


class Link:
    """`await ask(...)` runs a script; `tell(...)` does so beside the caller. `down` while the breaker is open."""

    def __init__(self, url: str, timeout_seconds: float, prefix: str) -> None:
        self.timeout_seconds = timeout_seconds
        # Timeouts are ours: redis-py's own go through wait_for, which on Python 3.11 can swallow a cancellation.
        self._redis: Any = redis.asyncio.Redis.from_url(
            url,
            socket_timeout=None,
            socket_connect_timeout=None,
            retry=Retry(NoBackoff(), 0),
            max_connections=MAX_CONNECTIONS,
        )
        self._probe_key = f"{prefix}:probe"
        self._waiting: list[_Command] = []
        self._sending: asyncio.Task[None] | None = None
        self.down = False
        self.reason = ""

    def ask(self, script: Script, keys: list[str], words: str) -> asyncio.Future[Any]:
        """What the script gives. The future fails with LinkDown when this batch, or the one before it, is late."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self.down or len(self._waiting) >= MAX_WAITING:
            future.set_exception(LinkDown(self.reason or "too many commands wait"))
            return future
        self._waiting.append((script, (len(keys), *keys, words), future))
        if self._sending is None:
            self._sending = asyncio.create_task(self._send())
        return future

    async def probe(self, seconds: float = 0) -> bool:
        """Whether Redis answers in time, or in so many seconds, and can be written to; opens or closes the breaker."""
        try:
            await self._in_time(self._redis.set(self._probe_key, 1, ex=60), max(seconds, self.timeout_seconds))
        except (RedisError, OSError, TimeoutError) as error:
            self.down, self.reason = True, _said(error)
            return False
        self.down = False
        return True

    async def close(self) -> None:
        """Ends what is under way and the connections."""
        if self._sending is not None:
            await asyncio.wait([self._sending], timeout=self.timeout_seconds)
        await self._redis.aclose()

    async def _send(self) -> None:
        """Sends batch after batch while something waits."""
        try:
            while self._waiting:
                batch, self._waiting = self._waiting, []
                try:
                    answers = await self._in_time(self._exchange(batch), self.timeout_seconds)
                except (RedisError, OSError, TimeoutError) as error:
                    self._fail(batch, error)
                    return
                for (_, _, future), answer in zip(batch, answers, strict=True):
                    if isinstance(answer, Exception):  # a replica, a full memory: it answers, but does not count
                        self.down, self.reason = True, _said(answer)
                    if not future.done():
                        _resolve(future, answer)
        finally:
            self._sending = None

    async def _in_time(self, asked: Coroutine[Any, Any, T], seconds: float) -> T:
        """What is asked for, or TimeoutError. A loop that is busy with other things does not make Redis late: the time
        is spent in slices, and what arrived in one of them is seen at its end."""
        task = asyncio.create_task(asked)
        try:
            for _ in range(SLICES):
                await asyncio.wait([task], timeout=seconds / SLICES)
                if task.done():
                    return task.result()
            raise TimeoutError
        finally:
            task.cancel()

    async def _exchange(self, batch: list[_Command]) -> list[Any]:
        answers = await self._pipeline([("EVALSHA", script.sha, *arguments) for script, arguments, _ in batch])
        lost = [number for number, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
        if lost:  # Redis is new or has restarted: the text goes along, once
            again = await self._pipeline([("EVAL", batch[number][0].text, *batch[number][1]) for number in lost])
            for number, answer in zip(lost, again, strict=True):
                answers[number] = answer
        return answers

    async def _pipeline(self, commands: list[tuple[Any, ...]]) -> list[Any]:
        pipeline = self._redis.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        answers: list[Any] = await pipeline.execute(raise_on_error=False)
        return answers

    def _fail(self, batch: list[_Command], error: Exception) -> None:
        """Opens the breaker and tells everybody who waits."""
        self.down, self.reason = True, _said(error)
        waiting, self._waiting = self._waiting, []
        is_sent = isinstance(error, TimeoutError)
        for commands, may_be_done in ((batch, is_sent), (waiting, False)):
            for _, _, future in commands:
                if not future.done():
                    future.set_exception(LinkDown(self.reason, may_be_done=may_be_done))


def _resolve(future: asyncio.Future[Any], answer: Any) -> None:
    if isinstance(answer, Exception):
        future.set_exception(LinkDown(_said(answer)))
    else:
        future.set_result(answer)


def _said(error: Exception) -> str:
    return "no answer in time" if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"
