"""A chat answer as a response object, whole or as events. Nothing is stored: a response can't be fetched again."""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.surfaces.blocks import Block, End, Kind
from gateway.surfaces.openai import ParsedRequest
from gateway.surfaces.responses_errors import FailedResponse, sse
from gateway.surfaces.responses_tools import as_text, known_tools
from gateway.surfaces.shapes import ErrorShape
from gateway.surfaces.translated import AnswerWriter
from protocol.responses import decode_tools
from tracing.ledger import Ledger, Usage

ECHOED: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "reasoning": {"effort": None, "summary": None},
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
    "user": None,
}
"""Fields of the request that its response repeats, and what stands there when they were absent."""
INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
_NO_TOOLS = msgspec.Raw(b"[]")
_PREFIXES = {Kind.REASONING: "rs", Kind.TEXT: "msg", Kind.REFUSAL: "msg", Kind.CALL: "fc"}


class ResponseWriter(AnswerWriter):
    """One response. Each block is an output item; a message has one part."""

    def __init__(self, request: ParsedRequest, ledger: Ledger) -> None:
        self._unique = ledger.request_id.removeprefix("req_")
        self._frame: dict[str, Any] = {
            "id": f"resp_{self._unique}",
            "object": "response",
            "created_at": ledger.wall_ns // 10**9,
            "model": request.model,
            "background": False,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
        }
        for name, absent in ECHOED.items():
            sent = request.fields.get(name)
            self._frame[name] = absent if sent is None or bytes(sent) == b"null" else sent
        self._tools = known_tools(decode_tools(request.fields.get("tools", _NO_TOOLS)) or [])
        self._failed = FailedResponse()

    def errors(self, surface: ErrorShape) -> ErrorShape:
        return self._failed

    def begin(self) -> bytes:
        response = self._response("in_progress", [])
        self._failed.response = msgspec.json.encode(response)
        created = self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    def open(self, block: Block) -> bytes:
        out = self._event("response.output_item.added", output_index=block.index, item=self._item(block, "in_progress"))
        if block.kind is Kind.CALL:
            return out
        return out + self._event("response.content_part.added", **self._place(block), part=_part(block, ""))

    def add(self, block: Block, piece: str) -> bytes:
        if self._is_custom(block):
            return b""  # its text is inside the arguments, known when they are whole
        if block.kind is Kind.CALL:
            kind, place = "response.function_call_arguments.delta", self._call_place(block)
        elif block.kind is Kind.TEXT:
            kind, place = "response.output_text.delta", {**self._place(block), "logprobs": []}
        else:
            kind, place = f"response.{_text_kind(block)}.delta", self._place(block)
        return self._event(kind, **place, delta=piece)

    def close(self, block: Block) -> bytes:
        text = block.text
        said: dict[str, Any]
        if self._is_custom(block):
            said_text, place = as_text(text), self._call_place(block)
            done = self._event("response.custom_tool_call_input.delta", **place, delta=said_text) if said_text else b""
            done += self._event("response.custom_tool_call_input.done", **place, input=said_text)
        elif block.kind is Kind.CALL:
            said = {"name": self._call(block, text)["name"], "arguments": text}
            done = self._event("response.function_call_arguments.done", **self._call_place(block), **said)
        else:
            place = self._place(block)
            if block.kind is Kind.TEXT:
                said = {"text": text, "logprobs": []}
            else:
                said = {"refusal" if block.kind is Kind.REFUSAL else "text": text}
            done = self._event(f"response.{_text_kind(block)}.done", **place, **said)
            done += self._event("response.content_part.done", **place, part=_part(block, text))
        item = self._item(block, "completed")
        return done + self._event("response.output_item.done", output_index=block.index, item=item)

    def finish(self, blocks: list[Block], end: End) -> bytes:
        response = self._ended(blocks, end)
        return self._event(f"response.{response['status']}", response=response)

    def comment(self) -> bytes:
        return b""

    def whole(self, blocks: list[Block], end: End) -> bytes:
        return msgspec.json.encode(self._ended(blocks, end))

    def _ended(self, blocks: list[Block], end: End) -> dict[str, Any]:
        reason = INCOMPLETE.get(end.finish_reason or "")
        output = [self._item(block, "completed") for block in blocks]
        if reason and output:
            output[-1]["status"] = "incomplete"
        return self._response("incomplete" if reason else "completed", output, reason, usage_of(end.usage))

    def _response(
        self,
        status: str,
        output: list[dict[str, Any]],
        incomplete: str | None = None,
        usage: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        return {
            **self._frame,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": incomplete} if incomplete else None,
            "output": output,
            "usage": usage,
        }

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        """An output item; in progress it is empty."""
        text = block.text if status == "completed" else ""
        item: dict[str, Any] = {"id": self._item_id(block), "status": status}
        if block.kind is Kind.CALL:
            return {**item, **self._call(block, text)}
        content = [_part(block, text)] if status == "completed" else []
        if block.kind is Kind.REASONING:
            return {**item, "type": "reasoning", "summary": [], "content": content}
        return {**item, "type": "message", "role": "assistant", "content": content}

    def _call(self, block: Block, arguments: str) -> dict[str, Any]:
        """A call's own fields, in the names that the client gave its tools."""
        known = self._tools.get(block.name)
        call: dict[str, Any] = {"call_id": block.call_id, "name": known.name if known else block.name}
        if known and known.namespace:
            call["namespace"] = known.namespace
        if known and known.is_custom:
            return {"type": "custom_tool_call", **call, "input": as_text(arguments) if arguments else ""}
        return {"type": "function_call", **call, "arguments": arguments}

    def _is_custom(self, block: Block) -> bool:
        known = self._tools.get(block.name) if block.kind is Kind.CALL else None
        return known is not None and known.is_custom

    def _item_id(self, block: Block) -> str:
        return f"{_PREFIXES[block.kind]}_{self._unique}_{block.index}"

    def _call_place(self, block: Block) -> dict[str, Any]:
        return {"item_id": self._item_id(block), "output_index": block.index}

    def _place(self, block: Block) -> dict[str, Any]:
        return {**self._call_place(block), "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        number = self._failed.sequence_number
        self._failed.sequence_number = number + 1
        return sse(kind, {"sequence_number": number, **fields})


def _text_kind(block: Block) -> str:
    return {Kind.TEXT: "output_text", Kind.REFUSAL: "refusal", Kind.REASONING: "reasoning_text"}[block.kind]


def _part(block: Block, text: str) -> dict[str, Any]:
    if block.kind is Kind.TEXT:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    if block.kind is Kind.REFUSAL:
        return {"type": "refusal", "refusal": text}
    return {"type": "reasoning_text", "text": text}


def usage_of(usage: Usage) -> dict[str, Any]:
    """In the words of this API."""
    given, made = usage.input_tokens or 0, usage.output_tokens or 0
    return {
        "input_tokens": given,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens or 0},
        "output_tokens": made,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": given + made,
    }
