"""The parts of Anthropic's Messages API that the gateway reads.

Requests are read in full only where they are translated: there a field that nobody here knows is refused, since leaving
it out could change what was asked. Events and answers of a server that speaks the API itself are only looked at.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from protocol.openai import ABSENT


class TextBlock(msgspec.Struct, frozen=True, tag="text"):
    """Text, in a prompt or an answer."""

    text: str


class Base64Source(msgspec.Struct, frozen=True, tag="base64"):
    """A file's bytes."""

    media_type: str
    data: str


class UrlSource(msgspec.Struct, frozen=True, tag="url"):
    """A file by its address."""

    url: str


class PlainTextSource(msgspec.Struct, frozen=True, tag="text"):
    """A document that is text."""

    data: str


class ImageBlock(msgspec.Struct, frozen=True, tag="image"):
    """An image of a prompt."""

    source: Base64Source | UrlSource


class DocumentBlock(msgspec.Struct, frozen=True, tag="document"):
    """A document of a prompt."""

    source: PlainTextSource
    title: str | None = None


class ToolUseBlock(msgspec.Struct, frozen=True, tag="tool_use"):
    """The assistant called a tool."""

    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(msgspec.Struct, frozen=True, tag="tool_result"):
    """What a tool said."""

    tool_use_id: str
    content: str | list[TextBlock | ImageBlock] | None = None
    is_error: bool | None = None


class ThinkingBlock(msgspec.Struct, frozen=True, tag="thinking"):
    """An earlier turn's reasoning."""


class RedactedThinkingBlock(msgspec.Struct, frozen=True, tag="redacted_thinking"):
    """The same, unreadable."""


Block = TextBlock | ImageBlock | DocumentBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock


class MessageParam(msgspec.Struct, frozen=True):
    """One turn."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ToolParam(msgspec.Struct, frozen=True):
    """A tool of the client's own; the provider's have other types."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None


class ToolChoice(msgspec.Struct, frozen=True):
    """Whether and which tool must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, frozen=True):
    """Whether the client wants to see the reasoning."""

    type: str = "disabled"


class OutputFormat(msgspec.Struct, frozen=True):
    """The answer must be JSON of this schema."""

    schema: dict[str, Any]
    type: Literal["json_schema"] = "json_schema"


class OutputConfig(msgspec.Struct, frozen=True):
    """How much effort, which form."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Metadata(msgspec.Struct, frozen=True):
    """Whose request it is."""

    user_id: str | None = None


class CountRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /messages/count_tokens`, and what a prompt is made of."""

    model: str
    messages: list[MessageParam]
    system: str | list[TextBlock] | None = None
    tools: list[ToolParam] = []
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    # Hints for a provider's caches and context keeping: without them the same is asked.
    cache_control: Any = None
    context_management: Any = None
    speed: Any = None


class MessagesRequest(CountRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /messages`."""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Metadata | None = None
    service_tier: Any = None
    diagnostics: Any = None
    # What other servers call their samplers' settings: handed on by name.
    seed: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    chat_template_kwargs: dict[str, Any] | None = None


decode_messages_request = msgspec.json.Decoder(MessagesRequest).decode
decode_count_request = msgspec.json.Decoder(CountRequest).decode


class Usage(msgspec.Struct, frozen=True):
    """`usage`; in a stream the counts so far, and absent ones stay as they were."""

    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None


class Delta(msgspec.Struct, frozen=True):
    """`delta` of content_block_delta or message_delta, or the block of content_block_start."""

    type: Any = None
    text: Any = None
    thinking: Any = None
    partial_json: Any = None
    stop_reason: str | None = None


class Answer(msgspec.Struct, frozen=True):
    """A whole message, or the message of message_start."""

    usage: msgspec.Raw = ABSENT
    stop_reason: str | None = None


class Event(msgspec.Struct, frozen=True):
    """An event of a stream."""

    type: str = ""
    message: Answer | None = None
    content_block: Delta | None = None
    delta: Delta | None = None
    usage: msgspec.Raw = ABSENT


decode_event = msgspec.json.Decoder(Event).decode
decode_message = msgspec.json.Decoder(Answer).decode
decode_message_usage = msgspec.json.Decoder(Usage).decode
