"""The bytes of a scripted answer in the two shapes of OpenAI's API: chat and text completions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from loadtest.scripted.script import Script

LINE_ENDS = {"lf": b"\n", "crlf": b"\r\n", "cr": b"\r"}
ERROR = {"error": {"message": "the script asks for an error", "type": "server_error", "code": "scripted_error"}}
_MULTIBYTE = ("漢字", "🙂", "é", "ñandú ", "👩‍👩‍👧")
PADDING_FIELD = "padding"


class Event(NamedTuple):
    """One event of a stream, and what it means."""

    what: str
    """As in Written."""
    data: bytes
    tokens: int = 0


def word(script: Script, index: int) -> str:
    """The text of the token with this index."""
    return _MULTIBYTE[index % len(_MULTIBYTE)] if script.text == "multibyte" else f"w{index} "


def text_of(script: Script, *, reasoning: bool = False) -> str:
    """All the visible (or all the reasoning) text of the answer."""
    first, end = (0, script.reasoning_tokens) if reasoning else (script.reasoning_tokens, script.tokens)
    return "".join(word(script, index) for index in range(first, end))


def usage_of(script: Script) -> dict[str, Any]:
    """The counts that the answer reports."""
    counts: dict[str, Any] = {
        "prompt_tokens": script.input_tokens,
        "completion_tokens": script.tokens,
        "total_tokens": script.input_tokens + script.tokens,
    }
    if script.reasoning_tokens:
        counts["completion_tokens_details"] = {"reasoning_tokens": script.reasoning_tokens}
    return counts


def role_event(script: Script, model: str) -> Event:
    """The event that begins a chat stream."""
    return Event("role", _chunk(script, model, "chat", {"role": "assistant", "content": ""}, None))


def token_events(script: Script, model: str, surface: str) -> Iterator[Event]:
    """The events that carry tokens. Reasoning and text are never in one event."""
    bounds = ((0, script.reasoning_tokens, "reasoning"), (script.reasoning_tokens, script.tokens, "token"))
    for first, end, what in bounds:
        for start in range(first, end, script.tokens_per_event):
            stop = min(start + script.tokens_per_event, end)
            text = "".join(word(script, index) for index in range(start, stop))
            delta = {"reasoning_content" if what == "reasoning" else "content": text}
            more: dict[str, Any] = {PADDING_FIELD: "x" * script.padding_bytes} if script.padding_bytes else {}
            if script.usage == "with_choices" and stop == script.tokens:
                more["usage"] = usage_of(script)
            yield Event(what, _chunk(script, model, surface, delta, None, **more), stop - start)


def finish_event(script: Script, model: str, surface: str, timings: dict[str, Any] | None) -> Event:
    """The event with the finish reason; an engine's full report rides on it."""
    more = {"timings": timings} if timings else {}
    return Event("finish", _chunk(script, model, surface, {}, "length", **more))


def usage_event(script: Script, model: str, surface: str) -> Event:
    """The event with the counts and no choices."""
    chunk = _base(script, model, surface, chunk=True) | {"choices": [], "usage": usage_of(script)}
    return Event("usage", _event(script, chunk))


def error_event(script: Script) -> Event:
    """An error in a stream."""
    return Event("error", _event(script, ERROR))


def done_event(script: Script) -> Event:
    """The end in words."""
    end = LINE_ENDS[script.line_end]
    return Event("done", b"data: [DONE]" + end + end)


def comment(script: Script) -> Event:
    """A keep-alive that means nothing."""
    end = LINE_ENDS[script.line_end]
    return Event("comment", b": keep-alive" + end + end)


def with_timings(event: Event, timings: dict[str, Any], script: Script) -> Event:
    """The event with an engine's report in it."""
    end = LINE_ENDS[script.line_end]
    fields = json.loads(event.data.removeprefix(b"data: ").removesuffix(end + end))
    return Event(event.what, _event(script, fields | {"timings": timings}), event.tokens)


def whole_body(script: Script, model: str, surface: str, timings: dict[str, Any] | None) -> bytes:
    """The answer in one piece."""
    text = text_of(script)
    choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
    if surface == "chat":
        choice["message"] = {"role": "assistant", "content": text}
        if script.reasoning_tokens:
            choice["message"]["reasoning_content"] = text_of(script, reasoning=True)
    else:
        choice["text"] = text
    body = _base(script, model, surface, chunk=False) | {"choices": [choice]}
    if script.usage != "none":
        body["usage"] = usage_of(script)
    if timings:
        body["timings"] = timings
    return json.dumps(body, ensure_ascii=False).encode()


def _chunk(script: Script, model: str, surface: str, delta: dict[str, Any], finish: str | None, **more: Any) -> bytes:
    choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
    if surface == "chat":
        choice["delta"] = delta
    else:
        choice["text"] = delta.get("content", "")
    return _event(script, _base(script, model, surface, chunk=True) | {"choices": [choice], **more})


def _base(script: Script, model: str, surface: str, *, chunk: bool) -> dict[str, Any]:
    kind = "text_completion"
    if surface == "chat":
        kind = "chat.completion.chunk" if chunk else "chat.completion"
    return {"id": f"scripted-{script.id}", "object": kind, "created": 1_700_000_000, "model": model}


def _event(script: Script, fields: dict[str, Any]) -> bytes:
    end = LINE_ENDS[script.line_end]
    return b"data: " + json.dumps(fields, ensure_ascii=False).encode() + end + end
