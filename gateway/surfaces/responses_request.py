"""A Responses request as a chat request. What chat has no word for is refused by name, never left out silently, unless
leaving it out asks the same: labels, hints for caches, earlier reasoning."""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.surfaces.openai import ParsedRequest
from gateway.surfaces.refusing import read_fields, refuse, untranslatable
from gateway.surfaces.responses_tools import as_arguments, chat_name, chat_tools
from protocol.responses import (
    CustomCallItem,
    CustomOutputItem,
    FunctionCallItem,
    FunctionChoice,
    FunctionOutputItem,
    InputImage,
    Item,
    MessageItem,
    Part,
    Refusal,
    ResponsesRequest,
    TextFormat,
)

decode_responses_request = msgspec.json.Decoder(ResponsesRequest).decode
HANDED_ON = (
    "temperature", "top_p", "parallel_tool_calls", "user", "stop", "seed", "top_k", "min_p", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "chat_template_kwargs",
)  # fmt: skip
ROLES = {"developer": "system"}
"""Chat templates know no developer."""


def responses_to_chat(request: ParsedRequest) -> dict[str, Any]:
    """The chat request's fields, less its model. Raises ApiError 400 that names the field."""
    found = read_fields(request.body, decode_responses_request, "Responses")
    messages: list[dict[str, Any]] = []
    if found.instructions:
        messages.append({"role": "system", "content": found.instructions})
    if isinstance(found.input, str):
        messages.append({"role": "user", "content": found.input})
    else:
        for index, item in enumerate(found.input):
            _add(messages, _item(item, f"input[{index}]"), f"input[{index}]")
    fields: dict[str, Any] = {"messages": messages}
    for name in HANDED_ON:
        value = getattr(found, name)
        if value is not None and (found.tools or name != "parallel_tool_calls"):
            fields[name] = value
    if found.max_output_tokens is not None:
        fields["max_tokens"] = found.max_output_tokens
    if found.reasoning and found.reasoning.effort:
        fields["reasoning_effort"] = found.reasoning.effort
    if found.text and found.text.verbosity:
        fields["verbosity"] = found.text.verbosity
    if found.text and found.text.format:
        fields |= _format(found.text.format)
    if found.tools:
        fields["tools"] = chat_tools(found.tools)
        if found.tool_choice is not None:
            fields["tool_choice"] = _choice(found.tool_choice)
    return fields


def _item(item: dict[str, Any], where: str) -> Item:
    """An item; one without a type is a message."""
    typed = item if "type" in item else {"type": "message", **item}
    if typed["type"] == "item_reference":
        raise refuse(f"{where}.type", "earlier items are not kept here. Send the items themselves.")
    try:
        return msgspec.convert(typed, Item)  # type: ignore[no-any-return]
    except msgspec.ValidationError as error:
        raise untranslatable(error, "Responses", where) from error


def _add(messages: list[dict[str, Any]], item: Item, where: str) -> None:
    """Appends an item's turn. A call belongs to the assistant's turn before it."""
    if isinstance(item, MessageItem):
        role = ROLES.get(item.role, item.role)
        messages.append({"role": role, "content": _content(item.content, where, may_hold_images=role == "user")})
    elif isinstance(item, FunctionCallItem | CustomCallItem):
        arguments = item.arguments if isinstance(item, FunctionCallItem) else as_arguments(item.input)
        function = {"name": chat_name(item.name, item.namespace), "arguments": arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        last = messages[-1] if messages else None
        if last is None or last["role"] != "assistant":
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        else:
            last.setdefault("tool_calls", []).append(call)
    elif isinstance(item, FunctionOutputItem | CustomOutputItem):
        said = _content(item.output, where, may_hold_images=False)
        messages.append({"role": "tool", "tool_call_id": item.call_id, "content": said})


def _content(content: str | list[Part], where: str, *, may_hold_images: bool) -> str | list[dict[str, Any]]:
    """Text alone as one string, which every chat template takes."""
    if isinstance(content, str):
        return content
    if not any(isinstance(part, InputImage) for part in content):
        return "".join(_text(part) for part in content)
    if not may_hold_images:
        raise refuse(where, "chat takes images in a user's message only.")
    return [_image(part) if isinstance(part, InputImage) else {"type": "text", "text": _text(part)} for part in content]


def _text(part: Part) -> str:
    if isinstance(part, Refusal):
        return part.refusal
    assert not isinstance(part, InputImage)
    return part.text


def _image(part: InputImage) -> dict[str, Any]:
    image = {"url": part.image_url}
    if part.detail:
        image["detail"] = part.detail
    return {"type": "image_url", "image_url": image}


def _format(wanted: TextFormat) -> dict[str, Any]:
    if wanted.type == "text":
        return {}
    if wanted.type == "json_object":
        return {"response_format": {"type": "json_object"}}
    if wanted.schema is None:
        raise refuse("text.format.schema", "it is missing.")
    schema: dict[str, Any] = {"name": wanted.name or "answer", "schema": wanted.schema}
    if wanted.description is not None:
        schema["description"] = wanted.description
    if wanted.strict is not None:
        schema["strict"] = wanted.strict
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _choice(choice: str | FunctionChoice) -> Any:
    if isinstance(choice, FunctionChoice):
        return {"type": "function", "function": {"name": choice.name}}
    return choice
