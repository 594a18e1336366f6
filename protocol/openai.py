"""The parts of OpenAI's shapes that the gateway reads. Everything else passes through as the bytes that came."""

from __future__ import annotations

from typing import Any

import msgspec


class StreamOptions(msgspec.Struct, frozen=True):
    """`stream_options` of a request."""

    include_usage: bool | None = None


class Request(msgspec.Struct, frozen=True):
    """What the gateway must know of a chat or completions request."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | float | None = None
    """`2.0` is a whole number too, in JSON."""


class Asked(msgspec.Struct, frozen=True):
    """What the gateway must know of a request on any other surface."""

    model: str
    stream: bool | None = None


class PromptDetails(msgspec.Struct, frozen=True):
    """`usage.prompt_tokens_details`."""

    cached_tokens: int | None = None


class CompletionDetails(msgspec.Struct, frozen=True):
    """`usage.completion_tokens_details`."""

    reasoning_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True):
    """`usage` of an answer."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: CompletionDetails | None = None


class Delta(msgspec.Struct, frozen=True, gc=False):
    """`delta` (or `message`) of a choice; other keys are not looked at."""

    content: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    refusal: Any = None
    tool_calls: Any = None
    function_call: Any = None

    @property
    def is_visible(self) -> bool:
        """Non-empty content."""
        return bool(self.content) or bool(self.refusal)

    @property
    def is_reasoning(self) -> bool:
        """Non-empty reasoning, under either name that servers give it."""
        return bool(self.reasoning_content) or bool(self.reasoning)

    @property
    def has_token(self) -> bool:
        """Non-empty content, reasoning or tool call."""
        return self.is_visible or self.is_reasoning or bool(self.tool_calls) or bool(self.function_call)


class Choice(msgspec.Struct, frozen=True, gc=False):
    """One choice of an event or of a whole answer."""

    delta: Delta | None = None
    message: Delta | None = None
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: Any = None
    """Where the server says so: the stop string that ended the answer."""
    index: int = 0


ABSENT = msgspec.Raw()


def is_present(raw: msgspec.Raw) -> bool:
    """Whether a key was there and not null."""
    return bool(raw) and bytes(raw) != b"null"


class Answer(msgspec.Struct, frozen=True, gc=False):
    """An event's data, or the body of a whole answer."""

    choices: list[Choice] = []
    usage: msgspec.Raw = ABSENT
    timings: msgspec.Raw = ABSENT
    error: msgspec.Raw = ABSENT


decode_request = msgspec.json.Decoder(Request).decode
decode_asked = msgspec.json.Decoder(Asked).decode
decode_answer = msgspec.json.Decoder(Answer).decode
decode_usage = msgspec.json.Decoder(Usage).decode
decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
"""The top level of an object; each value stays the bytes that came."""


def encode_fields(fields: dict[str, msgspec.Raw | bytes]) -> bytes:
    """The object again; values that nobody touched are byte for byte what came."""
    return b"{" + b",".join(msgspec.json.encode(name) + b":" + bytes(raw) for name, raw in fields.items()) + b"}"
