"""Surfaces spoken with an upstream that has chat only: the request becomes a chat request, the answer comes back as
blocks. Marks are stamped on the upstream's events, before anything is translated."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import msgspec

from gateway.surfaces.blocks import Blocks, BlockWriter, End
from gateway.surfaces.openai import ParsedRequest
from gateway.surfaces.shapes import ErrorShape
from gateway.surfaces.stream import DONE, ChatReader, EventRelay, count_by_events, read_timings, read_usage
from gateway.surfaces.surface import Dialect
from protocol.errors import ApiError
from protocol.openai import decode_answer, is_present
from tracing.ledger import Ledger

CHAT_PATH = "/chat/completions"


class AnswerWriter(BlockWriter):
    """Writes one answer, as events or whole."""

    with_reasoning = True
    """Whether the client sees the reasoning."""

    @abstractmethod
    def whole(self, blocks: list[Any], end: End) -> bytes:
        """The JSON of a whole answer. Raises ApiError 502 for what has no form on this surface."""

    @abstractmethod
    def comment(self) -> bytes:
        """What a comment of the upstream's, a sign of life, becomes."""

    def errors(self, surface: ErrorShape) -> ErrorShape:
        """How an error is told once events went out."""
        return surface


class Translated(Dialect):
    """A surface by way of chat."""

    def __init__(
        self,
        to_chat: Callable[[ParsedRequest], dict[str, Any]],
        writer: Callable[[ParsedRequest, Ledger], AnswerWriter],
    ) -> None:
        self._to_chat = to_chat
        self._writer = writer

    def path(self, request: ParsedRequest) -> str:
        return CHAT_PATH

    def body(self, request: ParsedRequest, model: str) -> bytes:
        made = request.translated.get(model)
        if made is None:
            fields = {"model": model, **self._to_chat(request)}
            if request.stream:
                fields |= {"stream": True, "stream_options": {"include_usage": True}}
            made = request.translated[model] = msgspec.json.encode(fields)
        return made

    def stream(self, ledger: Ledger, request: ParsedRequest, *, keep_timings: bool) -> EventRelay:
        return TranslatedRelay(ledger, self._writer(request, ledger))

    def whole(self, ledger: Ledger, request: ParsedRequest, body: bytes, *, keep_timings: bool) -> bytes:
        try:
            answer = decode_answer(body)
        except (msgspec.ValidationError, RecursionError) as error:
            raise _no_chat_answer() from error
        if not answer.choices:
            raise _no_chat_answer()
        if is_present(answer.usage):
            read_usage(ledger, answer.usage)
        if is_present(answer.timings):
            read_timings(ledger, answer.timings, ledger.upstream_end)
        writer = self._writer(request, ledger)
        blocks = Blocks(writer, with_reasoning=writer.with_reasoning)
        blocks.take(answer.choices)
        ledger.finish_reason = blocks.finish_reason
        return writer.whole(blocks.blocks, End(blocks.finish_reason, blocks.stop_string, ledger.usage))


class TranslatedRelay(ChatReader):
    """Takes chat events, gives the surface's."""

    retells_errors = True

    def __init__(self, ledger: Ledger, writer: AnswerWriter) -> None:
        super().__init__(ledger)
        self._writer = writer
        self._blocks = Blocks(writer, with_reasoning=writer.with_reasoning)
        self._has_begun = False
        self._has_finished = False

    def shape(self, surface: ErrorShape) -> ErrorShape:
        return self._writer.errors(surface)

    def _pass_on(self, event: bytes, now: int) -> bytes:
        ledger = self._ledger
        data = self._data(event, now)
        if data is None:
            return self._writer.comment() if self._has_begun and not self._has_finished else b""
        if self._has_finished:
            return b""
        if data == DONE:
            self.done = True
            return self._finish()
        try:
            answer = decode_answer(data)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ApiError(502, "upstream_error", "The upstream sent an event that is no chat chunk.") from error
        if is_present(answer.error) and not answer.choices:
            self.error = data
            self._has_finished = True
            return b""
        self._stamp(answer, now)
        if is_present(answer.usage):
            read_usage(ledger, answer.usage)
        if is_present(answer.timings):
            read_timings(ledger, answer.timings, now)
        return self._begin() + self._blocks.take(answer.choices)

    def _begin(self) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        return self._writer.begin()

    def _finish(self) -> bytes:
        self._has_finished = True
        count_by_events(self._ledger)
        return self._begin() + self._blocks.finish(self._ledger.usage)

    def _release(self) -> bytes:
        return self._finish() if self.done and not self._has_finished else b""


def _no_chat_answer() -> ApiError:
    return ApiError(502, "upstream_error", "The upstream answered with JSON that is no chat completion.")
