"""How the frontend has text made: of prompts tokens, of tokens text. Here in its own process; `processes` has the other
way. Both answer alike."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from backend_engine.core.messages import Outputs, Ready
from backend_engine.text.grammar import Grammars, check_grammar
from backend_engine.text.maker import TextMaker
from backend_engine.text.tokenizer import Tokenizer, load_tokenizer, prepare_tokenizer
from backend_engine.text.wire import Conversation, Open, Prompt, Texts
from protocol.errors import ApiError
from settings.schema import Settings
from tracing.clock import Clock

LONG_TEXT = 8192
"""Characters from which on tokenising takes long enough to be done beside the event loop (about 2 ms)."""
LONG_TOKENS = 4096

_Result = TypeVar("_Result")


class TextListener(Protocol):
    """Who is told of text; the frontend."""

    def take_texts(self, texts: Texts) -> None:
        """New text, and masks for the core."""

    def lose_texts(self, error: ApiError) -> None:
        """No answer that is open now gets any more text."""

    def tokenized(self, spent_ns: int) -> None:
        """A prompt became tokens in this time."""


class TextService(Protocol):
    """One tokenizer at work."""

    @property
    def is_ready(self) -> bool:
        """Text can be made."""

    @property
    def tool_format(self) -> str | None:
        """As of `Tokenizer`; None too while nothing is loaded."""

    async def run(
        self, ready: Callable[[], Awaitable[Ready]], listener: TextListener, loaded: Callable[[], None]
    ) -> None:
        """Loads what is needed, once the core has said Ready, calls `loaded`, and serves until it is cancelled.
        Raises TextError when it can't."""

    async def encode(self, source: Conversation | Prompt, grammar: str | None = None) -> list[int]:
        """A prompt's tokens. Raises ApiError: what is wrong with prompt or grammar, or that text can't be made now."""

    async def decode(self, tokens: list[int]) -> str:
        """Text at once, special tokens shown. Raises ApiError."""

    async def token_names(self, tokens: list[int]) -> list[str]:
        """Each token as the vocabulary writes it. Raises ApiError."""

    def open(self, opened: Open) -> None:
        """An answer begins; comes before any of its outputs."""

    def take(self, outputs: Outputs, data: bytes) -> None:
        """What the core said, decoded and as it came."""

    async def room(self) -> None:
        """Until more may be handed over by `take`."""


def encode_with(tokenizer: Tokenizer, source: Conversation | Prompt, grammar: str | None) -> list[int]:
    """Raises ApiError."""
    if grammar is not None:
        check_grammar(grammar)
    if isinstance(source, Conversation):
        return tokenizer.encode_chat(source.messages, open_answer=source.open_answer, tools=source.tools)
    if source.tokens is not None:
        return source.tokens
    return tokenizer.encode(source.text or "", special=source.special)


def _letters(source: Conversation | Prompt) -> int:
    if isinstance(source, Prompt):
        return len(source.text or "")
    return sum(len(message.get("content") or "") for message in source.messages)


class LocalText:
    """In the frontend itself (`token_interval.detokenizer_async` = false): long texts in a thread beside the event
    loop, all else in it."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._tokenizer: Tokenizer | None = None
        self._maker: TextMaker | None = None
        self._listener: TextListener
        self._thread = ThreadPoolExecutor(1, "text")

    @property
    def is_ready(self) -> bool:
        return self._tokenizer is not None

    @property
    def tool_format(self) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.tool_format

    async def run(
        self, ready: Callable[[], Awaitable[Ready]], listener: TextListener, loaded: Callable[[], None]
    ) -> None:
        try:
            await asyncio.to_thread(prepare_tokenizer, self._settings)
            said = await ready()  # only then are the model's files sure to be there
            tokenizer, grammars = await asyncio.to_thread(self._load, said)
            self.use(tokenizer, grammars, listener)
            loaded()
            await asyncio.Event().wait()
        finally:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _load(self, ready: Ready) -> tuple[Tokenizer, Grammars]:
        tokenizer = load_tokenizer(self._settings)
        grammars = Grammars(tokenizer, ready.vocab_size, ready.eos_token_ids)
        grammars.prepare()
        return tokenizer, grammars

    def use(self, tokenizer: Tokenizer, grammars: Grammars, listener: TextListener) -> None:
        """Serves with this tokenizer from now on."""
        self._listener = listener
        self._maker = TextMaker(tokenizer, grammars, self._clock)
        self._tokenizer = tokenizer

    async def encode(self, source: Conversation | Prompt, grammar: str | None = None) -> list[int]:
        tokenizer = self._loaded()
        began_ns = self._clock.mono_ns()
        is_long = _letters(source) > LONG_TEXT
        tokens = await self._do(lambda: encode_with(tokenizer, source, grammar), is_long=is_long)
        self._listener.tokenized(self._clock.mono_ns() - began_ns)
        return tokens

    async def decode(self, tokens: list[int]) -> str:
        tokenizer = self._loaded()
        return await self._do(lambda: tokenizer.decode(tokens, special=True), is_long=len(tokens) > LONG_TOKENS)

    async def token_names(self, tokens: list[int]) -> list[str]:
        tokenizer = self._loaded()
        return await self._do(lambda: tokenizer.token_names(tokens), is_long=len(tokens) > LONG_TOKENS)

    async def _do(self, work: Callable[[], _Result], *, is_long: bool) -> _Result:
        if not is_long:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _loaded(self) -> Tokenizer:
        if self._tokenizer is None:
            raise not_ready("The engine is still loading the model's tokenizer.")
        return self._tokenizer

    def open(self, opened: Open) -> None:
        assert self._maker is not None
        texts = self._maker.open(opened)
        if texts is not None:
            self._listener.take_texts(texts)

    def take(self, outputs: Outputs, data: bytes) -> None:
        if self._maker is not None and outputs.outputs:
            self._listener.take_texts(self._maker.take(outputs))

    async def room(self) -> None:
        return


def not_ready(why: str) -> ApiError:
    """503 for as long as there is nobody to make text."""
    return ApiError(503, "engine_unavailable", f"{why} Try again in a moment.", retry_after=2.0)
