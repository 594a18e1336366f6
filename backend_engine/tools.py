"""Tools of a chat request: checked, and what they ask of template, sampling and answer."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from backend_engine.fields import Fields, invalid, kind_of, shown, unsupported
from backend_engine.text.grammar import call_grammar
from backend_engine.text.tool_formats import HERMES, LLAMA3

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}\Z")


class Tools(msgspec.Struct, frozen=True):
    """Functions that the model may call, in OpenAI's shape."""

    functions: tuple[dict[str, Any], ...] = ()
    must_call: tuple[str, ...] = ()
    """It must call one of these; empty: as it likes."""
    has_history: bool = False
    """Messages hold calls or results."""

    @property
    def param(self) -> str | None:
        """The field that needs a template with tools, if any does."""
        return "tools" if self.functions else "messages" if self.has_history else None


def parse_tools(fields: Fields, *, has_history: bool) -> Tools:
    """`tools` and `tool_choice`. Raises ApiError 400."""
    functions = _functions(fields.get("tools"))
    names = tuple(tool["function"]["name"] for tool in functions)
    if fields.get("parallel_tool_calls") is False and functions:
        raise unsupported(
            "parallel_tool_calls",
            "'parallel_tool_calls': false is not built; a 'tool_choice' that names a function gives one call.",
        )
    choice = fields.get("tool_choice")
    if choice is None or choice == "auto":
        return Tools(functions, (), has_history)
    if choice == "none":
        return Tools((), (), has_history)
    if choice == "required":
        if not functions:
            raise invalid("tool_choice", "'tool_choice' is 'required', but there are no 'tools'.")
        return Tools(functions, names, has_history)
    name = choice.get("function", {}).get("name") if _is_named(choice) else None
    if not isinstance(name, str):
        raise invalid(
            "tool_choice",
            "'tool_choice' must be 'auto', 'none', 'required' or "
            f"{{'type': 'function', 'function': {{'name': ...}}}}, not {shown(choice)}.",
        )
    if name not in names:
        raise invalid("tool_choice", f"'tool_choice' names '{name[:64]}', which is none of the 'tools'.")
    return Tools(functions, (name,), has_history)


def _is_named(choice: Any) -> bool:
    return isinstance(choice, dict) and choice.get("type") == "function" and isinstance(choice.get("function"), dict)


def _functions(tools: Any) -> tuple[dict[str, Any], ...]:
    if tools is None:
        return ()
    if not isinstance(tools, list):
        raise invalid("tools", f"'tools' must be a list of functions, not {kind_of(tools)}.")
    if len(tools) > MAX_TOOLS:
        raise invalid("tools", f"'tools' may hold at most {MAX_TOOLS} functions, not {len(tools)}.")
    return tuple(_function(tool, f"tools[{at}]") for at, tool in enumerate(tools))


def _function(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or not isinstance(tool.get("type"), str):
        raise invalid(where, f"'{where}' must be an object with 'type': 'function'.")
    if tool["type"] != "function":
        raise unsupported(where, f"'{where}' has the type '{tool['type'][:60]}'; only functions can be called here.")
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not _NAME.match(name):
        raise invalid(
            f"{where}.function.name",
            f"'{where}.function.name' must be 1 to 64 letters, digits, '_', '-' or '.', not {shown(name)}.",
        )
    parameters = function.get("parameters", {})
    if parameters is not None and not isinstance(parameters, dict):
        raise invalid(
            f"{where}.function.parameters",
            f"'{where}.function.parameters' must be a JSON schema, not {kind_of(parameters)}.",
        )
    return {"type": "function", "function": function}


def tools_grammar(tools: Tools, tool_format: str) -> str | None:
    """What an answer that must call a tool follows; None where it need not."""
    if not tools.must_call:
        return None
    key = "parameters" if tool_format == LLAMA3 else "arguments"
    schemas = {
        tool["function"]["name"]: tool["function"].get("parameters") or {"type": "object"}
        for tool in tools.functions
        if tool["function"]["name"] in tools.must_call
    }
    before, after = ("<tool_call>\n", "\n</tool_call>") if tool_format == HERMES else ("", "")
    return call_grammar(before, key, schemas, after)
