"""A chat answer as Anthropic's: one message, whole or as events."""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.surfaces.blocks import Block, End, Kind
from gateway.surfaces.openai import ParsedRequest
from gateway.surfaces.responses_errors import sse
from gateway.surfaces.translated import AnswerWriter
from protocol.errors import ApiError
from tracing.ledger import Ledger, Usage

STOP_REASONS = {
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "function_call": "tool_use",
    "content_filter": "refusal",
}
"""Chat's reasons in Anthropic's words; anything else is the end of a turn."""
PING = sse("ping", {})
_NO_STOPS = msgspec.Raw(b"[]")


class MessageWriter(AnswerWriter):
    """Reasoning is shown to clients that asked for thinking, as Anthropic does."""

    def __init__(self, request: ParsedRequest, ledger: Ledger) -> None:
        thinking = request.fields.get("thinking")
        wanted: dict[str, Any] = (msgspec.json.decode(thinking) if thinking is not None else None) or {}
        self.with_reasoning = wanted.get("type", "disabled") != "disabled"
        self._stops: list[str] = msgspec.json.decode(request.fields.get("stop_sequences", _NO_STOPS)) or []
        self._model = request.model
        self._id = f"msg_{ledger.request_id.removeprefix('req_')}"

    def begin(self) -> bytes:
        message = self._message([], None, None, {"input_tokens": 0, "output_tokens": 0})
        return sse("message_start", {"message": message}) + PING

    def open(self, block: Block) -> bytes:
        start: dict[str, Any]
        if block.kind is Kind.REASONING:
            start = {"type": "thinking", "thinking": "", "signature": ""}
        elif block.kind is Kind.CALL:
            start = {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}
        else:
            start = {"type": "text", "text": ""}
        return sse("content_block_start", {"index": block.index, "content_block": start})

    def add(self, block: Block, piece: str) -> bytes:
        delta: dict[str, str]
        if block.kind is Kind.REASONING:
            delta = {"type": "thinking_delta", "thinking": piece}
        elif block.kind is Kind.CALL:
            delta = {"type": "input_json_delta", "partial_json": piece}
        else:
            delta = {"type": "text_delta", "text": piece}
        return sse("content_block_delta", {"index": block.index, "delta": delta})

    def close(self, block: Block) -> bytes:
        return sse("content_block_stop", {"index": block.index})

    def finish(self, blocks: list[Block], end: End) -> bytes:
        reason, stop = self._reason(blocks, end)
        delta = {"stop_reason": reason, "stop_sequence": stop}
        return sse("message_delta", {"delta": delta, "usage": usage_of(end.usage)}) + sse("message_stop", {})

    def comment(self) -> bytes:
        return PING

    def whole(self, blocks: list[Block], end: End) -> bytes:
        reason, stop = self._reason(blocks, end)
        content = [_content(block, is_cut=end.finish_reason == "length") for block in blocks]
        return msgspec.json.encode(self._message(content, reason, stop, usage_of(end.usage)))

    def _message(
        self, content: list[dict[str, Any]], reason: str | None, stop: str | None, usage: dict[str, int]
    ) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": usage,
        }

    def _reason(self, blocks: list[Block], end: End) -> tuple[str, str | None]:
        """(stop_reason, stop_sequence)."""
        if end.finish_reason == "stop" and end.stop_string in self._stops:
            return "stop_sequence", end.stop_string
        if any(block.kind is Kind.REFUSAL for block in blocks):
            return "refusal", None
        if end.finish_reason == "stop" and blocks and blocks[-1].kind is Kind.CALL:
            return "tool_use", None  # some servers say stop after a call that was demanded
        return STOP_REASONS.get(end.finish_reason or "", "end_turn"), None


def usage_of(usage: Usage) -> dict[str, int]:
    """Anthropic's input_tokens are those that no cache had."""
    cached = usage.cached_tokens or 0
    found = {"input_tokens": max((usage.input_tokens or 0) - cached, 0), "output_tokens": usage.output_tokens or 0}
    if usage.cached_tokens is not None:
        found["cache_read_input_tokens"] = cached
    return found


def _content(block: Block, *, is_cut: bool) -> dict[str, Any]:
    if block.kind is Kind.REASONING:
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    if block.kind is Kind.CALL:
        return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": _input(block, is_cut=is_cut)}
    return {"type": "text", "text": block.text}


def _input(block: Block, *, is_cut: bool) -> Any:
    """A call's arguments as an object; those that max_tokens cut off are none."""
    try:
        found = msgspec.json.decode(block.text or "{}")
    except (msgspec.DecodeError, RecursionError):
        found = None
    if isinstance(found, dict):
        return found
    if is_cut:
        return {}
    raise ApiError(502, "upstream_error", f"The model's arguments for the tool {block.name!r} are no JSON object.")
