"""Answers in OpenAI's shapes: whole, and as events of a stream.

What is the same in every event of a request is encoded once; an ordinary token's event costs one JSON string.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from protocol.timings import Timings

DONE = b"data: [DONE]\n\n"

encode = msgspec.json.Encoder().encode


class Answer(Protocol):
    """How one request is answered."""

    def event(self, text: str, timings: Timings | None = None) -> bytes:
        """The event of one step's new text; the first one also says who speaks."""

    def last(self, text: str, finish_reason: str, timings: Timings) -> bytes:
        """The event that ends the answer, with the text of the last step."""

    def usage(self, prompt_tokens: int, output_tokens: int, cached_tokens: int) -> bytes:
        """The event after it, for those who asked."""

    def whole(self, text: str, finish_reason: str, usage: dict[str, Any], timings: Timings) -> bytes:
        """The body of an answer that is not streamed."""


def usage_of(prompt_tokens: int, output_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """`usage` as OpenAI has it."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


class _Common:
    """Both shapes. `wants_usage`: events carry `usage` (null but in the last), as `stream_options` asked."""

    _OBJECT: str
    _STREAM_OBJECT: str

    def __init__(self, answer_id: str, created: int, model: str, *, wants_usage: bool) -> None:
        self._facts = {"id": answer_id, "object": self._OBJECT, "created": created, "model": model}
        streamed = encode({**self._facts, "object": self._STREAM_OBJECT})
        self._head = b"data: " + streamed[:-1] + b","
        self._usage_null = b',"usage":null' if wants_usage else b""
        self._started = False

    def _close(self, timings: Timings | None) -> bytes:
        report = b"" if timings is None else b',"timings":' + encode(timings)
        return self._usage_null + report + b"}\n\n"

    def usage(self, prompt_tokens: int, output_tokens: int, cached_tokens: int) -> bytes:
        counted = encode(usage_of(prompt_tokens, output_tokens, cached_tokens))
        return self._head + b'"choices":[],"usage":' + counted + b"}\n\n"

    def _whole(self, choice: dict[str, Any], usage: dict[str, Any], timings: Timings) -> bytes:
        return encode({**self._facts, "choices": [choice], "usage": usage, "timings": timings})


class ChatAnswer(_Common):
    """`chat.completion` and `chat.completion.chunk`."""

    _OBJECT = "chat.completion"
    _STREAM_OBJECT = "chat.completion.chunk"

    def __init__(self, answer_id: str, created: int, model: str, *, wants_usage: bool) -> None:
        super().__init__(answer_id, created, model, wants_usage=wants_usage)
        self._before = self._head + b'"choices":[{"index":0,"delta":{"content":'
        self._before_first = self._head + b'"choices":[{"index":0,"delta":{"role":"assistant","content":'
        self._after = b'},"logprobs":null,"finish_reason":null}]' + self._close(None)

    def event(self, text: str, timings: Timings | None = None) -> bytes:
        before = self._before if self._started else self._before_first
        self._started = True
        if timings is None:
            return before + encode(text) + self._after
        return before + encode(text) + b'},"logprobs":null,"finish_reason":null}]' + self._close(timings)

    def last(self, text: str, finish_reason: str, timings: Timings) -> bytes:
        if self._started:
            delta: dict[str, str] = {"content": text} if text else {}
        else:
            delta = {"role": "assistant", "content": text}
        self._started = True
        choice = encode([{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}])
        return self._head + b'"choices":' + choice + self._close(timings)

    def whole(self, text: str, finish_reason: str, usage: dict[str, Any], timings: Timings) -> bytes:
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason}
        return self._whole(choice, usage, timings)


class CompletionAnswer(_Common):
    """`text_completion`, whole and in a stream."""

    _OBJECT = "text_completion"
    _STREAM_OBJECT = "text_completion"

    def __init__(self, answer_id: str, created: int, model: str, *, wants_usage: bool) -> None:
        super().__init__(answer_id, created, model, wants_usage=wants_usage)
        self._before = self._head + b'"choices":[{"index":0,"text":'
        self._after = b',"logprobs":null,"finish_reason":null}]' + self._close(None)

    def event(self, text: str, timings: Timings | None = None) -> bytes:
        if timings is None:
            return self._before + encode(text) + self._after
        return self._before + encode(text) + b',"logprobs":null,"finish_reason":null}]' + self._close(timings)

    def last(self, text: str, finish_reason: str, timings: Timings) -> bytes:
        choice = encode([{"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}])
        return self._head + b'"choices":' + choice + self._close(timings)

    def whole(self, text: str, finish_reason: str, usage: dict[str, Any], timings: Timings) -> bytes:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}
        return self._whole(choice, usage, timings)
