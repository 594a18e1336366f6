"""What an event or a whole answer says, whichever API it belongs to: text, reasoning, token counts, errors, the end."""

from __future__ import annotations

from typing import Any

Fields = dict[str, Any]
_TEXT_DELTAS = {"response.output_text.delta": "text", "response.reasoning_text.delta": "reasoning"}
_ENDS = frozenset({"message_stop", "response.completed", "response.incomplete"})
_LAST = frozenset({"response.completed", "response.incomplete", "response.failed"})


def text_in(fields: Fields) -> str:
    """Visible text."""
    kind = fields.get("type")
    if kind is None:
        return _of_choice(fields, "content")
    if kind == "content_block_delta":
        return str(_inside(fields, "delta").get("text") or "")
    return str(fields.get("delta") or "") if _TEXT_DELTAS.get(str(kind)) == "text" else _of_parts(fields)


def reasoning_in(fields: Fields) -> str:
    """Reasoning text."""
    kind = fields.get("type")
    if kind is None:
        return _of_choice(fields, "reasoning_content") or _of_choice(fields, "reasoning")
    if kind == "content_block_delta":
        return str(_inside(fields, "delta").get("thinking") or "")
    return str(fields.get("delta") or "") if _TEXT_DELTAS.get(str(kind)) == "reasoning" else ""


def usage_in(fields: Fields) -> Fields | None:
    """Token counts in chat's names. What Anthropic's message_start says is a beginning and no count."""
    usage = fields.get("usage")
    if fields.get("type") in _LAST:
        usage = _inside(fields, "response").get("usage")
    if not isinstance(usage, dict):
        return None
    if "output_tokens" not in usage:
        return usage
    cached = int(usage.get("cache_read_input_tokens") or 0)
    return {"prompt_tokens": usage.get("input_tokens", 0) + cached, "completion_tokens": usage["output_tokens"]}


def is_error(fields: Fields) -> bool:
    """Whether it is an error, or an answer that failed."""
    return bool(fields.get("error")) or fields.get("type") == "response.failed"


def is_end(fields: Fields) -> bool:
    """Whether it says that the answer is complete."""
    choices = fields.get("choices")
    finished = isinstance(choices, list) and bool(choices) and bool(choices[0].get("finish_reason"))
    return finished or fields.get("type") in _ENDS


def _inside(fields: Fields, name: str) -> Fields:
    found = fields.get(name)
    return found if isinstance(found, dict) else {}


def _of_choice(fields: Fields, name: str) -> str:
    choices = fields.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        return "" if name != "content" else _of_parts(fields)
    choice = choices[0]
    inside = choice.get("delta") or choice.get("message")
    if isinstance(inside, dict):
        return str(inside.get(name) or "")
    return str(choice.get("text") or "") if name == "content" else ""


def _of_parts(fields: Fields) -> str:
    """Text of a whole message or response."""
    if fields.get("type") == "message":
        parts = fields.get("content")
    elif fields.get("object") == "response":
        parts = [part for item in fields.get("output") or [] for part in item.get("content") or []]
    else:
        return ""
    found = parts if isinstance(parts, list) else []
    return "".join(str(part.get("text") or "") for part in found if part.get("type") in ("text", "output_text"))
