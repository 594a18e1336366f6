"""A script: how the upstream is to answer one request. It travels in the prompt, the one thing no gateway touches."""

from __future__ import annotations

import json
from typing import Any, Literal

import msgspec

MARKER = "tokenline-script "
"""What a prompt begins with when a script follows."""

End = Literal[
    "complete",
    "status",
    "error_first",
    "error_mid",
    "cut_first",
    "cut_mid",
    "drop_reused",
]
"""complete: the answer ends well. status: an HTTP error. error_first, error_mid: an error event before anything, or
after the first token. cut_first, cut_mid: the connection is cut before the headers, or after the first token.
drop_reused: a connection that has carried an answer before is cut before the headers; a fresh one is answered."""


class Script(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One request's answer. Times are pauses in ms that really happen; what they came to is in the Witness."""

    id: str
    """Names the request in what the upstream witnessed."""

    tokens: int = 5
    """Output tokens, reasoning included."""
    tokens_per_event: int = 1
    reasoning_tokens: int = 0
    """The first of `tokens` are reasoning (chat only)."""
    input_tokens: int = 11
    role_event: bool = True
    """Chat streams begin with an event that carries the role and no token."""

    headers_ms: float = 0
    """Before the status line; comes after the request was read."""
    tokenize_ms: float = 1
    queue_ms: float = 4
    prefill_ms: float = 8
    """These three pass, one after another, before the first token."""
    gap_ms: float = 5
    """Between two token events."""
    tail_ms: float = 0
    """Between the last event and the end of the body."""

    text: Literal["plain", "multibyte"] = "plain"
    line_end: Literal["lf", "crlf", "cr"] = "lf"
    piece_bytes: int = 0
    """Above 0: every event leaves in pieces of so many bytes, each written on its own."""
    piece_ms: float = 1
    padding_bytes: int = 0
    """Added to every token event, in a field that no client knows."""
    comments: bool = False
    """Keep-alive comments between the events."""
    done: bool = True
    """`[DONE]` is sent."""
    usage: Literal["once", "none", "twice", "with_choices"] = "once"

    end: End = "complete"
    status: int = 500
    only_at: str | None = None
    """`end` is met only at the upstream of this name; others answer to the end."""

    timings: Literal["none", "here", "elsewhere", "durations"] = "none"
    """An engine's report in band: marks of this host, marks of another host, or durations alone (llama.cpp)."""
    server_timing: bool = False
    spans: Literal["none", "parent", "children"] = "none"
    """Engine spans by OTLP: `llm_request` with gen_ai.latency.* alone, or with children too."""
    span_delay_ms: float = 0
    """After the answer's end."""

    @property
    def prompt(self) -> str:
        """The user message that asks for this script."""
        return MARKER + msgspec.json.encode(self).decode()

    def ends_badly_at(self, upstream: str) -> bool:
        """Whether the upstream of this name meets `end`."""
        return self.end != "complete" and self.only_at in (None, upstream)


_decode_script = msgspec.json.Decoder(Script).decode


def body_of(script: Script, model: str, surface: str, *, stream: bool, **fields: Any) -> dict[str, Any]:
    """The JSON request that a client sends to have the script played on chat, completions, responses or messages."""
    prompt, tokens = script.prompt, max(script.tokens, 1)
    asked: dict[str, Any]
    if surface == "completions":
        asked = {"prompt": prompt, "max_tokens": tokens}
    elif surface == "responses":
        asked = {"input": prompt, "max_output_tokens": tokens}
    else:
        asked = {"messages": [{"role": "user", "content": prompt}], "max_tokens": tokens}
        if surface == "messages" and script.reasoning_tokens:
            asked["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    return {"model": model, **asked, "stream": stream, **fields}


def script_of(body: bytes) -> Script | None:
    """The script that a request's body asks for; None where it asks for none. Raises ValueError on a broken one."""
    try:
        request = json.loads(body)
    except ValueError:
        return None
    if not isinstance(request, dict):
        return None
    for text in _prompts(request):
        if text.startswith(MARKER):
            return _decode_script(text.removeprefix(MARKER))
    return None


def _prompts(request: dict[str, Any]) -> list[str]:
    prompt = request.get("prompt")
    if isinstance(prompt, list):
        return [text for text in prompt if isinstance(text, str)]
    if isinstance(prompt, str):
        return [prompt]
    found: list[str] = []
    for message in request.get("messages") or []:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, str):
            found.append(content)
        elif isinstance(content, list):  # some gateways turn a text into parts
            found += [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
    return found
