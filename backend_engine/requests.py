"""Requests as they arrive: JSON to a checked structure, or an error that names the field, its value and the fix."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from backend_engine.parameters import Fields, Parameters, invalid, parse_parameters, unsupported
from protocol.errors import ApiError

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Role as sent -> role in the chat template; OpenAI's `developer` is what templates call `system`."""
_TOOL_ROLES = ("tool", "function")
_TEXT_PARTS = ("text", "input_text", "output_text")


class Conversation(msgspec.Struct, frozen=True):
    """Chat messages, each a role and a text."""

    messages: tuple[dict[str, str], ...]


class Prompt(msgspec.Struct, frozen=True):
    """A text to go on with, or token ids in its place."""

    text: str | None = None
    tokens: list[int] | None = None
    param: Literal["prompt"] = "prompt"


class GenerationRequest(msgspec.Struct, frozen=True):
    """A request for an answer; lengths are not checked yet, since nothing is tokenised."""

    source: Conversation | Prompt
    parameters: Parameters


def parse_chat(body: bytes, served_model: str) -> GenerationRequest:
    """POST /v1/chat/completions. Raises ApiError 400 or 404."""
    fields = parse_object(body)
    check_model(fields, served_model)
    parameters = parse_parameters(fields)
    return GenerationRequest(parse_messages(fields), parameters)


def parse_completion(body: bytes, served_model: str) -> GenerationRequest:
    """POST /v1/completions. Raises ApiError 400 or 404."""
    fields = parse_object(body)
    check_model(fields, served_model)
    parameters = parse_parameters(fields)
    return GenerationRequest(parse_prompt(fields), parameters)


def parse_object(body: bytes) -> Fields:
    """The body as a JSON object. Raises ApiError 400 invalid_json."""
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, "invalid_json", f"The body is not valid JSON: {error}.") from error
    except RecursionError as error:
        raise ApiError(400, "invalid_json", "The body is not usable JSON: it is nested too deeply.") from error
    if not isinstance(fields, dict):
        raise ApiError(400, "invalid_json", f"The body must be a JSON object, not {_kind(fields)}.")
    return fields


def check_model(fields: Fields, served_model: str, *, is_required: bool = True) -> None:
    """Raises ApiError 400 without a usable model name, 404 for one that is not served."""
    model = fields.get("model")
    if model is None and not is_required:
        return
    if model is None:
        raise invalid("model", f"The field 'model' is missing; this engine serves '{served_model}'.")
    if not isinstance(model, str):
        raise invalid("model", f"'model' must be a string, not {_kind(model)}.")
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
        raise invalid("messages", f"'messages' must be a list of messages, not {_kind(messages)}.")
    if not messages:
        raise invalid("messages", "'messages' is empty; send at least one message.")
    return Conversation(tuple(_message(message, f"messages[{at}]") for at, message in enumerate(messages)))


def _message(message: Any, where: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise invalid(where, f"'{where}' must be an object with 'role' and 'content', not {_kind(message)}.")
    role = message.get("role")
    if role in _TOOL_ROLES or message.get("tool_calls") or message.get("function_call"):
        param = f"{where}.role" if role in _TOOL_ROLES else f"{where}.tool_calls"
        raise unsupported(param, f"'{where}' belongs to a tool call; this engine has none. Use another upstream.")
    if not isinstance(role, str) or role not in ROLES:
        seen = "missing" if role is None else f"'{str(role)[:60]}'"
        raise invalid(f"{where}.role", f"'{where}.role' is {seen}; known roles are {', '.join(ROLES)}.")
    return {"role": ROLES[role], "content": _content(message.get("content"), f"{where}.content")}


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        raise invalid(where, f"'{where}' is missing; it must be a string or a list of text parts.")
    if not isinstance(content, list):
        raise invalid(where, f"'{where}' must be a string or a list of text parts, not {_kind(content)}.")
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
        raise invalid(f"{where}.text", f"'{where}.text' must be a string, not {_kind(text)}.")
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
    raise invalid("prompt", f"'prompt' must be a string or a list of token ids, not {_kind(prompt)}.")


def _kind(value: Any) -> str:
    """A JSON value's kind in words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    names = {int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)
