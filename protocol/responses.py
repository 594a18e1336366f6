"""The parts of OpenAI's Responses API that the gateway reads.

As with Messages: a request is read in full only where it is translated, and there an unknown field is refused.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from protocol.openai import ABSENT


class InputText(msgspec.Struct, frozen=True, tag="input_text"):
    """Text of a prompt."""

    text: str


class OutputText(msgspec.Struct, frozen=True, tag="output_text"):
    """Text of an earlier answer."""

    text: str


class PlainText(msgspec.Struct, frozen=True, tag="text"):
    """The same, as some clients name it."""

    text: str


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """An earlier refusal."""

    refusal: str


class InputImage(msgspec.Struct, frozen=True, tag="input_image"):
    """An image by its address or as a data URL."""

    image_url: str
    detail: str | None = None


Part = InputText | OutputText | PlainText | Refusal | InputImage


class MessageItem(msgspec.Struct, frozen=True, tag="message"):
    """One turn."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Part]


class FunctionCallItem(msgspec.Struct, frozen=True, tag="function_call"):
    """The assistant called a function."""

    call_id: str
    name: str
    arguments: str
    namespace: str | None = None


class FunctionOutputItem(msgspec.Struct, frozen=True, tag="function_call_output"):
    """What the function said."""

    call_id: str
    output: str | list[Part]


class CustomCallItem(msgspec.Struct, frozen=True, tag="custom_tool_call"):
    """The assistant called a custom tool."""

    call_id: str
    name: str
    input: str
    namespace: str | None = None


class CustomOutputItem(msgspec.Struct, frozen=True, tag="custom_tool_call_output"):
    """What the custom tool said."""

    call_id: str
    output: str | list[Part]


class ReasoningItem(msgspec.Struct, frozen=True, tag="reasoning"):
    """An earlier turn's reasoning."""


Item = MessageItem | FunctionCallItem | FunctionOutputItem | CustomCallItem | CustomOutputItem | ReasoningItem


class FunctionTool(msgspec.Struct, frozen=True, tag="function"):
    """A function of the client's own; the provider's tools have other types."""

    name: str
    parameters: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class CustomFormat(msgspec.Struct, frozen=True):
    """What a custom tool's text must look like."""

    type: Literal["text", "grammar"] = "text"
    definition: str | None = None
    syntax: str | None = None


class CustomTool(msgspec.Struct, frozen=True, tag="custom"):
    """A tool of the client's own that takes plain text."""

    name: str
    description: str | None = None
    format: CustomFormat | None = None


class NamespaceTool(msgspec.Struct, frozen=True, tag="namespace"):
    """Tools under a common name."""

    name: str
    tools: list[FunctionTool | CustomTool]


Tool = FunctionTool | CustomTool | NamespaceTool


class FunctionChoice(msgspec.Struct, frozen=True):
    """This tool must be called."""

    type: Literal["function", "custom"]
    name: str


class TextFormat(msgspec.Struct, frozen=True):
    """The form of the answer's text."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class Text(msgspec.Struct, frozen=True):
    """`text`."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(msgspec.Struct, frozen=True):
    """`reasoning`: the effort; how its summary should look is the provider's."""

    effort: str | None = None


class ResponsesRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /responses`."""

    model: str
    input: str | list[dict[str, Any]] = ""
    instructions: str | None = None
    stream: bool | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    text: Text | None = None
    reasoning: Reasoning | None = None
    user: str | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    # State that a provider would hold: must be absent.
    previous_response_id: None = None
    conversation: None = None
    prompt: None = None
    # Hints and labels: without them the same is asked.
    store: bool | None = None
    metadata: dict[str, str] | None = None
    stream_options: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None
    client_metadata: Any = None
    max_tool_calls: Any = None
    """Of the provider's own tools, of which there are none here."""
    top_logprobs: Literal[0] | None = None
    # What other servers call their samplers' settings: handed on by name.
    stop: str | list[str] | None = None
    seed: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class InputDetails(msgspec.Struct, frozen=True):
    """`usage.input_tokens_details`."""

    cached_tokens: int | None = None


class OutputDetails(msgspec.Struct, frozen=True):
    """`usage.output_tokens_details`."""

    reasoning_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True):
    """`usage`."""

    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: InputDetails | None = None
    output_tokens_details: OutputDetails | None = None


class Incomplete(msgspec.Struct, frozen=True):
    """`incomplete_details`."""

    reason: str | None = None


class Answer(msgspec.Struct, frozen=True):
    """A response object, whole or inside an event."""

    status: str | None = None
    incomplete_details: Incomplete | None = None
    usage: msgspec.Raw = ABSENT
    error: msgspec.Raw = ABSENT


class OutputItem(msgspec.Struct, frozen=True):
    """The item of output_item.added."""

    type: str = ""


class Event(msgspec.Struct, frozen=True):
    """An event of a stream."""

    type: str = ""
    delta: Any = None
    item: OutputItem | None = None
    response: msgspec.Raw = ABSENT
    sequence_number: int | None = None


decode_tools = msgspec.json.Decoder(list[Tool] | None).decode
decode_event = msgspec.json.Decoder(Event).decode
decode_response = msgspec.json.Decoder(Answer).decode
decode_response_usage = msgspec.json.Decoder(Usage).decode
