"""A Messages request as a chat request. What chat has no word for is refused by name, never left out silently, unless
leaving it out asks the same: hints for caches, earlier reasoning, how much to think."""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.surfaces.openai import ParsedRequest
from gateway.surfaces.refusing import read_fields, refuse
from protocol.anthropic import (
    Base64Source,
    Block,
    CountRequest,
    DocumentBlock,
    ImageBlock,
    MessageParam,
    MessagesRequest,
    TextBlock,
    ToolChoice,
    ToolParam,
    ToolResultBlock,
    ToolUseBlock,
    decode_count_request,
    decode_messages_request,
)

HANDED_ON = (
    "temperature", "top_p", "top_k", "seed", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "chat_template_kwargs", "max_tokens",
)  # fmt: skip
EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
CHOICES: dict[str, Any] = {"auto": "auto", "any": "required", "none": "none"}


def messages_to_chat(request: ParsedRequest) -> dict[str, Any]:
    """The chat request's fields, less its model. Raises ApiError 400 that names the field."""
    found: MessagesRequest = read_fields(request.body, decode_messages_request, "Messages")
    fields = prompt_to_chat(found)
    for name in HANDED_ON:
        value = getattr(found, name)
        if value is not None:
            fields[name] = value
    if found.stop_sequences:
        fields["stop"] = found.stop_sequences
    if found.metadata and found.metadata.user_id:
        fields["user"] = found.metadata.user_id
    if found.tools and found.tool_choice:
        fields |= _choice(found.tool_choice)
    config = found.output_config
    if config and config.effort:
        fields["reasoning_effort"] = EFFORTS[config.effort]
    wanted = found.output_format or (config.format if config else None)
    if wanted:
        fields["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": wanted.schema, "strict": True},
        }
    return fields


def count_to_tokenize(request: ParsedRequest) -> dict[str, Any]:
    """The same prompt for an upstream's /tokenize, less its model."""
    found: CountRequest = read_fields(request.body, decode_count_request, "count_tokens")
    return {**prompt_to_chat(found), "add_generation_prompt": True}


def prompt_to_chat(found: CountRequest) -> dict[str, Any]:
    """`messages` and `tools`."""
    messages: list[dict[str, Any]] = []
    if found.system:
        messages.append({"role": "system", "content": _joined(found.system)})
    for index, message in enumerate(found.messages):
        messages += _turn(message, f"messages[{index}]")
    if found.messages and found.messages[-1].role == "assistant":
        raise refuse(
            f"messages[{len(found.messages) - 1}]",
            "the last turn is the assistant's, and chat can't continue a turn that was begun. End with a user's turn.",
        )
    fields: dict[str, Any] = {"messages": messages}
    if found.tools:
        fields["tools"] = [_tool(tool) for tool in found.tools]
    return fields


def _joined(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n\n".join(block.text for block in content)


def _turn(message: MessageParam, where: str) -> list[dict[str, Any]]:
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    if message.role == "assistant":
        return [_assistant(message.content, where)]
    turns: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    for index, block in enumerate(message.content):
        if isinstance(block, ToolResultBlock) and message.role == "user":
            if parts:
                raise refuse(f"{where}.content[{index}]", "a tool_result must come before the turn's other blocks.")
            turns += _result(block)
        else:
            parts.append(_part(block, f"{where}.content[{index}]"))
    if parts:
        turns.append({"role": message.role, "content": _parts(parts)})
    return turns


def _assistant(blocks: list[Block], where: str) -> dict[str, Any]:
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ToolUseBlock):
            arguments = msgspec.json.encode(block.input).decode()
            calls.append({"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}})
        elif isinstance(block, ImageBlock | DocumentBlock | ToolResultBlock):
            raise refuse(f"{where}.content[{index}].type", "such a block can't be in an assistant's turn.")
    turn: dict[str, Any] = {"role": "assistant", "content": "".join(texts) or None}
    if calls:
        turn["tool_calls"] = calls
    elif not texts:
        turn["content"] = ""
    return turn


def _result(block: ToolResultBlock) -> list[dict[str, Any]]:
    """The tool's turn; its images in a user's turn after it, since chat's tools say text only."""
    content = block.content or ""
    texts = [content] if isinstance(content, str) else [part.text for part in content if isinstance(part, TextBlock)]
    said = "\n\n".join(texts)
    if block.is_error and not said.lower().startswith("error"):
        said = f"Error: {said}"
    turns: list[dict[str, Any]] = [{"role": "tool", "tool_call_id": block.tool_use_id, "content": said}]
    if not isinstance(content, str):
        images = [_part(part, "") for part in content if isinstance(part, ImageBlock)]
        if images:
            turns.append({"role": "user", "content": images})
    return turns


def _part(block: Block, where: str) -> dict[str, Any]:
    if isinstance(block, TextBlock):
        return {"type": "text", "text": block.text}
    if isinstance(block, DocumentBlock):
        title = f"{block.title}\n\n" if block.title else ""
        return {"type": "text", "text": title + block.source.data}
    if isinstance(block, ImageBlock):
        source = block.source
        url = f"data:{source.media_type};base64,{source.data}" if isinstance(source, Base64Source) else source.url
        return {"type": "image_url", "image_url": {"url": url}}
    raise refuse(f"{where}.type", "such a block can't be in this turn.")


def _parts(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Text alone as one string, which every chat template takes."""
    if all(part["type"] == "text" for part in parts):
        return "\n\n".join(part["text"] for part in parts)
    return parts


def _tool(tool: ToolParam) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _choice(choice: ToolChoice) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if choice.type == "tool":
        if not choice.name:
            raise refuse("tool_choice.name", "it must name the tool.")
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    else:
        fields["tool_choice"] = CHOICES[choice.type]
    if choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    return fields
