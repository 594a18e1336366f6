"""Requests as they arrive: JSON to a checked structure, or an error that names the field, its value and the fix."""

from __future__ import annotations

from typing import Any

import msgspec

from backend_engine.fields import Fields, invalid, kind_of, unsupported
from backend_engine.formats import parse_format
from backend_engine.parameters import Parameters, parse_parameters
from backend_engine.text.wire import Conversation, Prompt
from backend_engine.tools import Tools, parse_tools
from protocol.errors import ApiError

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Role as sent -> role in the chat template; OpenAI's `developer` is what templates call `system`."""
_TEXT_PARTS = ("text", "input_text", "output_text")


class GenerationRequest(msgspec.Struct, frozen=True):
    """A request for an answer; lengths are not checked yet, since nothing is tokenised."""

    source: Conversation | Prompt
    parameters: Parameters
    tools: Tools = Tools()
    grammar: str | None = None
    """Of `response_format`."""

    @property
    def param(self) -> str:
        """The field that the prompt comes from."""
        return "prompt" if isinstance(self.source, Prompt) else "messages"


def parse_chat(body: bytes, served_model: str) -> GenerationRequest:
    """POST /v1/chat/completions. Raises ApiError 400 or 404."""
    fields = parse_object(body)
    check_model(fields, served_model)
    parameters = parse_parameters(fields, is_chat=True)
    messages = parse_messages(fields)
    has_history = any(message["role"] == "tool" or "tool_calls" in message for message in messages.messages)
    tools = parse_tools(fields, has_history=has_history)
    grammar = parse_format(fields)
    _check_together(parameters, tools, grammar)
    source = msgspec.structs.replace(messages, tools=tools.functions)
    return GenerationRequest(source, parameters, tools, grammar)


def _check_together(parameters: Parameters, tools: Tools, grammar: str | None) -> None:
    """What can't be had at once."""
    if grammar is not None and tools.functions:
        raise unsupported("response_format", "'response_format' together with 'tools' is not built; send one of them.")
    if tools.functions and parameters.logprobs is not None:
        raise unsupported("logprobs", "'logprobs' together with 'tools' is not built; send one of them.")
    if grammar is not None or tools.must_call:
        param = "response_format" if grammar is not None else "tool_choice"
        for name, is_set in (("ignore_eos", parameters.ignore_eos), ("min_tokens", parameters.min_tokens)):
            if is_set:
                raise invalid(
                    name, f"'{name}' can't be kept with this '{param}', which says where the answer ends. Leave it out."
                )


def parse_completion(body: bytes, served_model: str) -> GenerationRequest:
    """POST /v1/completions. Raises ApiError 400 or 404."""
    fields = parse_object(body)
    check_model(fields, served_model)
    parameters = parse_parameters(fields, is_chat=False)
    grammar = parse_format(fields)
    _check_together(parameters, Tools(), grammar)
    return GenerationRequest(parse_prompt(fields), parameters, Tools(), grammar)


def parse_object(body: bytes) -> Fields:
    """The body as a JSON object. Raises ApiError 400 invalid_json."""
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, "invalid_json", f"The body is not valid JSON: {error}.") from error
    except RecursionError as error:
        raise ApiError(400, "invalid_json", "The body is not usable JSON: it is nested too deeply.") from error
    if not isinstance(fields, dict):
        raise ApiError(400, "invalid_json", f"The body must be a JSON object, not {kind_of(fields)}.")
    return fields


def check_model(fields: Fields, served_model: str, *, is_required: bool = True) -> None:
    """Raises ApiError 400 without a usable model name, 404 for one that is not served."""
    model = fields.get("model")
    if model is None and not is_required:
        return
    if model is None:
        raise invalid("model", f"The field 'model' is missing; this engine serves '{served_model}'.")
    if not isinstance(model, str):
        raise invalid("model", f"'model' must be a string, not {kind_of(model)}.")
    if model != served_model:
        raise ApiError(
            404,
            "model_not_found",
            f"The model '{model[:100]}' is not served here; this engine serves '{served_model}'.",
            param="model",
        )


def parse_messages(fields: Fields) -> Conversation:
    """`messages` of a chat request. Raises ApiError 400."""
    messages = fields.get("messages")
    if messages is None:
        raise invalid("messages", "The field 'messages' is missing.")
    if not isinstance(messages, list):
        raise invalid("messages", f"'messages' must be a list of messages, not {kind_of(messages)}.")
    if not messages:
        raise invalid("messages", "'messages' is empty; send at least one message.")
    return Conversation(tuple(_message(message, f"messages[{at}]") for at, message in enumerate(messages)))


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise invalid(where, f"'{where}' must be an object with 'role' and 'content', not {kind_of(message)}.")
    role = message.get("role")
    if role == "tool":
        return _tool_result(message, where)
    if role == "function" or message.get("function_call"):
        raise unsupported(where, f"'{where}' is of the older function calls, which are not built; use 'tools'.")
    if not isinstance(role, str) or role not in ROLES:
        seen = "missing" if role is None else f"'{str(role)[:60]}'"
        raise invalid(f"{where}.role", f"'{where}.role' is {seen}; known roles are {', '.join(ROLES)}, tool.")
    content, calls = message.get("content"), message.get("tool_calls")
    if not calls:
        return {"role": ROLES[role], "content": _content(content, f"{where}.content")}
    if role != "assistant":
        raise invalid(f"{where}.tool_calls", f"'{where}.tool_calls' belongs to the role 'assistant', not '{role}'.")
    text = "" if content is None else _content(content, f"{where}.content")
    return {"role": "assistant", "content": text, "tool_calls": _calls(calls, f"{where}.tool_calls")}


def _tool_result(message: dict[str, Any], where: str) -> dict[str, Any]:
    call_id = message.get("tool_call_id")
    if not isinstance(call_id, str):
        raise invalid(f"{where}.tool_call_id", f"'{where}.tool_call_id' must be a string, not {kind_of(call_id)}.")
    content = _content(message.get("content"), f"{where}.content")
    name = {"name": message["name"]} if isinstance(message.get("name"), str) else {}
    return {"role": "tool", "tool_call_id": call_id, "content": content, **name}


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """As templates take them: the arguments as an object, since most write them as JSON themselves."""
    if not isinstance(calls, list):
        raise invalid(where, f"'{where}' must be a list of calls, not {kind_of(calls)}.")
    return [_call(call, f"{where}[{at}]") for at, call in enumerate(calls)]


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid(f"{where}.function.name", f"'{where}' must be a call with 'id' and 'function': {{'name': ...}}.")
    given = function.get("arguments") or "{}"
    try:
        arguments = msgspec.json.decode(given) if isinstance(given, str) else given
    except msgspec.DecodeError:
        arguments = None
    if not isinstance(arguments, dict):
        raise invalid(
            f"{where}.function.arguments", f"'{where}.function.arguments' must be a JSON object written as a string."
        )
    return {
        "id": str(call.get("id") or ""),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        raise invalid(where, f"'{where}' is missing; it must be a string or a list of text parts.")
    if not isinstance(content, list):
        raise invalid(where, f"'{where}' must be a string or a list of text parts, not {kind_of(content)}.")
    return "\n".join(_text_part(part, f"{where}[{at}]") for at, part in enumerate(content))


def _text_part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise invalid(where, f"'{where}' must be an object with a 'type', such as {{'type': 'text', 'text': ...}}.")
    if kind not in _TEXT_PARTS:
        raise unsupported(
            where, f"'{where}' has the type '{kind[:60]}'; this engine reads text only. Send it to another upstream."
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise invalid(f"{where}.text", f"'{where}.text' must be a string, not {kind_of(text)}.")
    return text


def parse_prompt(fields: Fields) -> Prompt:
    """`prompt` of a completion: a string or token ids, alone or as the only entry of a list. Raises ApiError 400."""
    prompt = fields.get("prompt")
    if prompt is None:
        raise invalid("prompt", "The field 'prompt' is missing.")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise unsupported(
                "prompt", f"'prompt' holds {len(prompt)} prompts; this engine takes one per request. Send them apart."
            )
        prompt = prompt[0]
    if prompt in ("", []):
        raise invalid("prompt", "'prompt' is empty; send at least one token of text.")
    if isinstance(prompt, str):
        return Prompt(text=prompt)
    if isinstance(prompt, list) and all(type(token) is int for token in prompt):
        return Prompt(tokens=prompt)
    raise invalid("prompt", f"'prompt' must be a string or a list of token ids, not {kind_of(prompt)}.")
