"""Text made in processes of its own: tokenizers, and one detokenizer, pipelined with the engine.

Jobs of a tokenizer are answered in their order. The detokenizer gets every message of the core in its order, and each
answer's Open before its first output. A process that dies is started again; what it had in hand gets an error.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from backend_engine.core.messages import Outputs, Ready
from backend_engine.text.child_process import STUCK_SECONDS, ChildProcess
from backend_engine.text.service import TextListener, not_ready
from backend_engine.text.wire import (
    Conversation,
    Decode,
    Done,
    Encode,
    Name,
    Open,
    Prompt,
    Refused,
    Start,
    Texts,
    decode_from_detokenizer,
    decode_from_tokenizer,
    encode,
)
from protocol.errors import ApiError

log = logging.getLogger(__name__)

MAX_UNANSWERED = 1024
"""Messages of the core that the detokenizer may be behind. Beyond them the frontend reads no more, and the core waits
once its own queue is full too: no step runs whose text nobody makes."""
CORES_PER_TOKENIZER = 16


def tokenizers_for(cores: int) -> int:
    """One, and one more for every CORES_PER_TOKENIZER cores, up to four: each costs 250 MiB and tokenises about a
    million tokens per second."""
    return min(4, 1 + cores // CORES_PER_TOKENIZER)


class ProcessText:
    """`token_interval.detokenizer_async` = true."""

    def __init__(
        self, folder: Path, max_jobs: int, cores: int | None = None, stuck_seconds: float = STUCK_SECONDS
    ) -> None:
        self._folder = folder
        self._max_jobs = max_jobs
        count = tokenizers_for(cores or len(os.sched_getaffinity(0)))
        self._tokenizers = [_Tokenizer(number, folder, max_jobs, stuck_seconds) for number in range(count)]
        self._detokenizer = ChildProcess(
            "detokenize",
            0,
            folder,
            MAX_UNANSWERED + max_jobs + 16,
            decode_from_detokenizer,
            lambda: self._unanswered > 0,
            stuck_seconds,
        )
        self._unanswered = 0
        self._has_room = asyncio.Event()
        self._listener: TextListener
        self._loaded: Callable[[], None]

    # -- life --------------------------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        return self._detokenizer.loaded is not None and any(one.is_ready for one in self._tokenizers)

    @property
    def tool_format(self) -> str | None:
        found = [one.child.loaded for one in self._tokenizers if one.child.loaded is not None]
        return found[0].tool_format if found else None

    async def run(
        self, ready: Callable[[], Awaitable[Ready]], listener: TextListener, loaded: Callable[[], None]
    ) -> None:
        self._listener = listener
        self._loaded = loaded
        has_tokenizer = asyncio.Event()

        async def start() -> Start:
            said = await ready()
            return Start(str(self._folder / "tokenizer.json"), said.vocab_size, said.eos_token_ids)

        async def start_detokenizer() -> Start:
            await has_tokenizer.wait()  # which has written what this one reads
            return await start()

        def tokenizer_loaded() -> None:
            has_tokenizer.set()
            self._is_loaded()

        try:
            async with asyncio.TaskGroup() as group:
                for one in self._tokenizers:
                    living = one.child.run(start, tokenizer_loaded, self._take_done, one.lose)
                    group.create_task(living, name="tokenizer")
                living = self._detokenizer.run(start_detokenizer, self._is_loaded, self._take_texts, self._lose_texts)
                group.create_task(living, name="detokenizer")
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    def _is_loaded(self) -> None:
        self._has_room.set()
        if self.is_ready:
            self._loaded()

    # -- the tokenizers ----------------------------------------------------------------------------------------------

    async def encode(self, source: Conversation | Prompt, grammar: str | None = None) -> list[int]:
        if isinstance(source, Prompt) and source.tokens is not None and grammar is None:
            return source.tokens
        done = await self._do(lambda job: Encode(job, source, grammar))
        self._listener.tokenized(done.spent_ns)
        return done.tokens

    async def decode(self, tokens: list[int]) -> str:
        return (await self._do(lambda job: Decode(job, tokens))).text

    async def token_names(self, tokens: list[int]) -> list[str]:
        return (await self._do(lambda job: Name(job, tokens))).names

    async def _do(self, job: Callable[[int], Encode | Decode | Name]) -> Done:
        able = [one for one in self._tokenizers if one.is_ready]
        if not able:
            raise not_ready("The engine's tokenizer is being started.")
        return await min(able, key=lambda one: one.count).do(job)

    def _take_done(self, message: msgspec.Struct) -> None:
        assert isinstance(message, Done | Refused)
        for one in self._tokenizers:
            if one.take(message):
                return

    # -- the detokenizer ---------------------------------------------------------------------------------------------

    def open(self, opened: Open) -> None:
        if self._detokenizer.loaded is None:
            raise not_ready("The engine's detokenizer is being started.")
        self._detokenizer.send(encode(opened))

    def take(self, outputs: Outputs, data: bytes) -> None:
        if self._detokenizer.loaded is None or not outputs.outputs:
            return
        self._unanswered += 1
        if self._unanswered >= MAX_UNANSWERED:
            if self._has_room.is_set():
                log.warning("the detokenizer is %d steps behind; the core waits for it", self._unanswered)
            self._has_room.clear()
        self._detokenizer.send(data)

    async def room(self) -> None:
        if self._unanswered >= MAX_UNANSWERED:
            await self._has_room.wait()

    def _take_texts(self, message: msgspec.Struct) -> None:
        assert isinstance(message, Texts)
        if message.is_step:
            self._unanswered -= 1
            if self._unanswered < MAX_UNANSWERED // 2:
                self._has_room.set()
        self._listener.take_texts(message)

    def _lose_texts(self) -> None:
        self._unanswered = 0
        self._has_room.set()
        self._listener.lose_texts(
            not_ready("The engine's detokenizer ended while this answer was made; it is being started again.")
        )


class _Tokenizer:
    """One process, and the jobs that it has not answered."""

    def __init__(self, number: int, folder: Path, max_jobs: int, stuck_seconds: float) -> None:
        self.child = ChildProcess(
            "tokenize", number, folder, max_jobs + 1, decode_from_tokenizer, lambda: bool(self._jobs), stuck_seconds
        )
        self._max_jobs = max_jobs
        self._jobs: dict[int, asyncio.Future[Done]] = {}
        self._next = number << 40
        """Job ids of one tokenizer are never another's."""

    @property
    def is_ready(self) -> bool:
        return self.child.loaded is not None

    @property
    def count(self) -> int:
        """Jobs under way."""
        return len(self._jobs)

    async def do(self, job: Callable[[int], Encode | Decode | Name]) -> Done:
        """Raises ApiError."""
        if len(self._jobs) >= self._max_jobs:
            raise ApiError(
                429,
                "queue_full",
                f"{len(self._jobs)} texts wait for the engine's tokenizer, which is its limit "
                "(server.max_concurrent_requests).",
                retry_after=1.0,
            )
        self._next += 1
        number = self._next
        future: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
        self._jobs[number] = future
        self.child.send(encode(job(number)))
        return await future  # a job that nobody waits for any more is still one until it is answered

    def take(self, message: Done | Refused) -> bool:
        """False for a job that isn't this one's."""
        future = self._jobs.pop(message.job, None)
        if future is None:
            return False
        if not future.done():
            if isinstance(message, Done):
                future.set_result(message)
            else:
                future.set_exception(ApiError(message.status, message.code, message.message, param=message.param))
        return True

    def lose(self) -> None:
        """It died."""
        jobs, self._jobs = self._jobs, {}
        for future in jobs.values():
            if not future.done():
                why = "The engine's tokenizer ended while it had this request; it is being started again."
                future.set_exception(not_ready(why))
