"""Answers in OpenAI's shapes: whole, and as events of a stream.

What is the same in every event of a choice is encoded once; an ordinary token's event costs one JSON string.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from backend_engine.text.tool_calls import Call
from backend_engine.text.wire import SampledText, TokenText
from protocol.ids import new_request_id
from protocol.timings import Timings

DONE = b"data: [DONE]\n\n"

encode = msgspec.json.Encoder().encode


class Part(msgspec.Struct, frozen=True):
    """What is told of one choice at once."""

    index: int
    text: str
    logprobs: list[SampledText] | None = None
    calls: tuple[Call, ...] = ()
    finish_reason: str | None = None
    """Set: the choice ends here."""


class Answer(Protocol):
    """How one request is answered."""

    def event(self, part: Part, timings: Timings | None = None) -> bytes:
        """The event of one step's news of a choice; a chat choice's first one also says who speaks."""

    def usage(self, prompt_tokens: int, output_tokens: int, cached_tokens: int) -> bytes:
        """The event after all, for those who asked."""

    def whole(self, parts: Sequence[Part], usage: dict[str, Any], timings: Timings) -> bytes:
        """The body of an answer that is not streamed, from each choice's whole text."""


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

    def __init__(self, answer_id: str, created: int, model: str, *, wants_usage: bool, choices: int = 1) -> None:
        self._facts = {"id": answer_id, "object": self._OBJECT, "created": created, "model": model}
        streamed = encode({**self._facts, "object": self._STREAM_OBJECT})
        self._head = b"data: " + streamed[:-1] + b","
        self._choice = [self._head + b'"choices":[{"index":%d,' % index for index in range(choices)]
        self._usage_null = b',"usage":null' if wants_usage else b""
        self._calls = [0] * choices
        """Calls of each choice so far."""
        self._started = [False] * choices

    def _close(self, timings: Timings | None) -> bytes:
        report = b"" if timings is None else b',"timings":' + encode(timings)
        return self._usage_null + report + b"}\n\n"

    def usage(self, prompt_tokens: int, output_tokens: int, cached_tokens: int) -> bytes:
        counted = encode(usage_of(prompt_tokens, output_tokens, cached_tokens))
        return self._head + b'"choices":[],"usage":' + counted + b"}\n\n"

    def whole(self, parts: Sequence[Part], usage: dict[str, Any], timings: Timings) -> bytes:
        choices = [self._whole_choice(part) for part in parts]
        return encode({**self._facts, "choices": choices, "usage": usage, "timings": timings})

    def _whole_choice(self, part: Part) -> dict[str, Any]:
        raise NotImplementedError

    def _call_id(self) -> str:
        return "call_" + new_request_id().removeprefix("req_")


class ChatAnswer(_Common):
    """`chat.completion` and `chat.completion.chunk`."""

    _OBJECT = "chat.completion"
    _STREAM_OBJECT = "chat.completion.chunk"

    def __init__(self, answer_id: str, created: int, model: str, *, wants_usage: bool, choices: int = 1) -> None:
        super().__init__(answer_id, created, model, wants_usage=wants_usage, choices=choices)
        self._before = [choice + b'"delta":{"content":' for choice in self._choice]
        self._rest = b'},"logprobs":null,"finish_reason":null}]'
        self._after = self._rest + self._close(None)

    def event(self, part: Part, timings: Timings | None = None) -> bytes:
        index = part.index
        if self._started[index] and part.finish_reason is None and part.logprobs is None and not part.calls:
            after = self._after if timings is None else self._rest + self._close(timings)
            return self._before[index] + encode(part.text) + after
        delta: dict[str, Any] = {}
        if not self._started[index]:
            delta = {"role": "assistant", "content": part.text if part.text or not part.calls else None}
        elif part.text:
            delta["content"] = part.text
        self._started[index] = True
        if part.calls:
            delta["tool_calls"] = [self._call(index, call) for call in part.calls]
        rest = {"delta": delta, "logprobs": chat_logprobs(part.logprobs), "finish_reason": part.finish_reason}
        return self._choice[index] + encode(rest)[1:] + b"]" + self._close(timings)

    def _call(self, index: int, call: Call) -> dict[str, Any]:
        at = self._calls[index]
        self._calls[index] += 1
        return {"index": at, **self._whole_call(call)}

    def _whole_call(self, call: Call) -> dict[str, Any]:
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": self._call_id(), "type": "function", "function": function}

    def _whole_choice(self, part: Part) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": part.text, "refusal": None}
        if part.calls:
            message["content"] = part.text or None
            message["tool_calls"] = [self._whole_call(call) for call in part.calls]
        return {
            "index": part.index,
            "message": message,
            "logprobs": chat_logprobs(part.logprobs),
            "finish_reason": part.finish_reason,
        }


class CompletionAnswer(_Common):
    """`text_completion`, whole and in a stream."""

    _OBJECT = "text_completion"
    _STREAM_OBJECT = "text_completion"

    def __init__(self, answer_id: str, created: int, model: str, *, wants_usage: bool, choices: int = 1) -> None:
        super().__init__(answer_id, created, model, wants_usage=wants_usage, choices=choices)
        self._before = [choice + b'"text":' for choice in self._choice]
        self._rest = b',"logprobs":null,"finish_reason":null}]'
        self._after = self._rest + self._close(None)

    def event(self, part: Part, timings: Timings | None = None) -> bytes:
        if part.finish_reason is None and part.logprobs is None:
            after = self._after if timings is None else self._rest + self._close(timings)
            return self._before[part.index] + encode(part.text) + after
        choice = self._whole_choice(part)
        del choice["index"]
        return self._choice[part.index] + encode(choice)[1:] + b"]" + self._close(timings)

    def _whole_choice(self, part: Part) -> dict[str, Any]:
        return {
            "index": part.index,
            "text": part.text,
            "logprobs": completion_logprobs(part.logprobs),
            "finish_reason": part.finish_reason,
        }


def chat_logprobs(sampled: list[SampledText] | None) -> dict[str, Any] | None:
    """`logprobs` of a chat choice."""
    if not sampled:
        return None

    def word(token: TokenText) -> dict[str, Any]:
        return {"token": token.text, "bytes": list(token.data), "logprob": token.logprob}

    content = [{**word(one.token), "top_logprobs": [word(other) for other in one.top]} for one in sampled]
    return {"content": content, "refusal": None}


def completion_logprobs(sampled: list[SampledText] | None) -> dict[str, Any] | None:
    """`logprobs` of a completion's choice. Of several tokens with the same text, the likeliest stands in
    `top_logprobs`."""
    if not sampled:
        return None
    return {
        "tokens": [one.token.text for one in sampled],
        "token_logprobs": [one.token.logprob for one in sampled],
        "top_logprobs": [{other.text: other.logprob for other in reversed(one.top)} for one in sampled],
        "text_offset": [one.offset for one in sampled],
    }
