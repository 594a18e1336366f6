"""The Responses API's tools as chat's functions, and their calls back again.

Chat has one kind of tool and one flat list. A tool of a namespace becomes a function with both names in its own; a
custom tool, which takes plain text, becomes a function with that text as its one argument.
"""

from __future__ import annotations

import zlib
from typing import Any

import msgspec

from protocol.responses import CustomTool, FunctionTool, NamespaceTool, Tool

MAX_NAME = 64
"""Of a function in chat."""
TEXT_ARGUMENT = "input"
_TEXT_SCHEMA = {
    "type": "object",
    "properties": {TEXT_ARGUMENT: {"type": "string"}},
    "required": [TEXT_ARGUMENT],
    "additionalProperties": False,
}


class Known(msgspec.Struct, frozen=True):
    """What a function of the chat request stands for."""

    name: str
    namespace: str | None
    is_custom: bool


def chat_name(name: str, namespace: str | None) -> str:
    """The function's name; too long a one is cut, and stays its own by a checksum."""
    if not namespace:
        return name
    whole = f"{namespace}{'' if namespace.endswith('__') else '__'}{name}"
    return whole if len(whole) <= MAX_NAME else f"{whole[: MAX_NAME - 9]}_{zlib.crc32(whole.encode()):08x}"


def chat_tools(tools: list[Tool]) -> list[dict[str, Any]]:
    """The chat request's `tools`."""
    return [_function(tool, namespace) for tool, namespace in _flat(tools)]


def known_tools(tools: list[Tool]) -> dict[str, Known]:
    """By the names that the model sees."""
    return {
        chat_name(tool.name, namespace): Known(tool.name, namespace, isinstance(tool, CustomTool))
        for tool, namespace in _flat(tools)
    }


def as_arguments(text: str) -> str:
    """A custom tool's text as a function's arguments."""
    return msgspec.json.encode({TEXT_ARGUMENT: text}).decode()


def as_text(arguments: str) -> str:
    """And back; arguments that are no such thing are the text themselves."""
    try:
        found = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return arguments
    text = found.get(TEXT_ARGUMENT) if isinstance(found, dict) else None
    return text if isinstance(text, str) else arguments


def _flat(tools: list[Tool]) -> list[tuple[FunctionTool | CustomTool, str | None]]:
    flat: list[tuple[FunctionTool | CustomTool, str | None]] = []
    for tool in tools:
        if isinstance(tool, NamespaceTool):
            flat += [(inner, tool.name) for inner in tool.tools]
        else:
            flat.append((tool, None))
    return flat


def _function(tool: FunctionTool | CustomTool, namespace: str | None) -> dict[str, Any]:
    function: dict[str, Any] = {"name": chat_name(tool.name, namespace)}
    if isinstance(tool, CustomTool):
        function |= {"description": _described(tool), "parameters": _TEXT_SCHEMA}
    else:
        for name in ("description", "parameters", "strict"):
            value = getattr(tool, name)
            if value is not None:
                function[name] = value
    return {"type": "function", "function": function}


def _described(tool: CustomTool) -> str:
    """The grammar is told to the model; chat can't hold it to that."""
    said = tool.description or ""
    if tool.format is not None and tool.format.definition:
        said = f"{said}\n\nThe input must follow this {tool.format.syntax or ''} grammar:\n{tool.format.definition}"
    return said.strip()
