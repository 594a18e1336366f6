"""Tokens of a text where the server's usage does not tell: by the endpoint's /tokenize, or by a tokenizer at hand."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

from loadtest.endpoint import Endpoint, NotAnswered
from loadtest.record import Record
from settings.errors import SettingsError

AT_ONCE = 8
MOST_COUNTED = 20_000
"""Answers that are counted after a run; of more, the rest stay counted by events."""


class Tokenizer(Protocol):
    """Counts tokens as the served model would."""

    name: str
    """For people: "the endpoint's /tokenize"."""

    async def of_chat(self, text: str) -> int:
        """Tokens of a chat of one user's message, the template included. Raises NotAnswered."""

    async def of_text(self, text: str) -> int:
        """Tokens of a bare text. Raises NotAnswered."""


class EndpointTokenizer:
    """The server's own."""

    name = "the endpoint's /tokenize"

    def __init__(self, endpoint: Endpoint, model: str) -> None:
        self._endpoint = endpoint
        self._model = model

    async def of_chat(self, text: str) -> int:
        messages = [{"role": "user", "content": text}]
        return await self._endpoint.count_tokens(self._model, messages=messages, add_generation_prompt=True)

    async def of_text(self, text: str) -> int:
        return await self._endpoint.count_tokens(self._model, prompt=text, add_special_tokens=False)


class LocalTokenizer:
    """One of Hugging Face's, by its name or folder. Raises SettingsError where it can't be had."""

    def __init__(self, source: str) -> None:
        try:
            from transformers import AutoTokenizer
        except ImportError:
            raise SettingsError(
                f"workload.tokenizer = {source!r}: needs transformers: pip install 'tokenline[engine]'"
            ) from None
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(source)
        except (OSError, ValueError, KeyError) as error:
            said = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise SettingsError(f"workload.tokenizer = {source!r}: can't be loaded: {said}") from None
        self.name = f"the tokenizer {source}"

    async def of_chat(self, text: str) -> int:
        if self._tokenizer.chat_template is None:
            return len(self._tokenizer(text)["input_ids"])
        chat = [{"role": "user", "content": text}]
        shown = self._tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        return len(self._tokenizer(shown, add_special_tokens=False)["input_ids"])

    async def of_text(self, text: str) -> int:
        return len(self._tokenizer(text, add_special_tokens=False)["input_ids"])


async def count_answers(records: Sequence[Record], tokenizer: Tokenizer) -> None:
    """Counts what complete answers without usage said; where that can't be done, they stay counted by events."""
    uncounted = [r for r in records if r.is_good and r.usage_tokens is None and r.text][:MOST_COUNTED]
    gate = asyncio.Semaphore(AT_ONCE)
    failed = False

    async def count(record: Record) -> None:
        nonlocal failed
        async with gate:
            if failed:
                return
            try:
                record.counted_tokens = await tokenizer.of_text("".join(record.text or ()))
                record.counted_by = tokenizer.name
            except NotAnswered:
                failed = True

    await asyncio.gather(*(count(record) for record in uncounted))
    for record in records:
        record.text = None
