"""The official SDKs as clients of a rig, and upstreams that speak the APIs which the gateway passes through."""

from __future__ import annotations

import json
from typing import Any

from anthropic import AsyncAnthropic
from gateway_rig import DONE, KEY, Rig, chunk, event
from openai import AsyncOpenAI

PREFIXES = ("/api", "/api/v1", "/v1")
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
USAGE = {
    "prompt_tokens": 9,
    "completion_tokens": 4,
    "total_tokens": 13,
    "prompt_tokens_details": {"cached_tokens": 2},
    "completion_tokens_details": {"reasoning_tokens": 1},
}
USAGE_EVENT = event({"id": "c", "object": "chat.completion.chunk", "choices": [], "usage": USAGE})


def openai_client(r: Rig, prefix: str = "/api") -> AsyncOpenAI:
    return AsyncOpenAI(base_url=r.origin + prefix, api_key=KEY, max_retries=0, timeout=10)


def anthropic_client(r: Rig, prefix: str = "/api") -> AsyncAnthropic:
    return AsyncAnthropic(base_url=r.origin + prefix, api_key=KEY, max_retries=0, timeout=10)


def delta(**fields: object) -> bytes:
    return event({"id": "c", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": fields}]})


def call_delta(index: int, arguments: str, call_id: str | None = None, name: str | None = None) -> bytes:
    call: dict[str, Any] = {"index": index, "function": {"arguments": arguments}}
    if call_id:
        call |= {"id": call_id, "type": "function"}
        call["function"]["name"] = name
    return delta(tool_calls=[call])


ROLE = delta(role="assistant", content="")
TEXT_STREAM = (ROLE, chunk("he"), chunk("llo"), chunk(finish="stop"), USAGE_EVENT, DONE)
TOOL_STREAM = (
    ROLE,
    delta(reasoning_content="hm"),
    chunk("I look."),
    call_delta(0, "", "call_a", "weather"),
    call_delta(0, '{"city":'),
    call_delta(0, '"Rome"}'),
    call_delta(1, '{"city":"Oslo"}', "call_b", "weather"),
    chunk(finish="tool_calls"),
    USAGE_EVENT,
    DONE,
)


def chat_answer(content: str | None = "hello", finish: str = "stop", **message: object) -> dict[str, Any]:
    return {
        "id": "c",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": content, **message}, "finish_reason": finish}
        ],
        "usage": USAGE,
    }


TOOL_ANSWER = chat_answer(
    "I look.",
    "tool_calls",
    reasoning_content="hm",
    tool_calls=[
        {"id": "call_a", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Rome"}'}},
        {"id": "call_b", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Oslo"}'}},
    ],
)


def named(kind: str, **fields: object) -> bytes:
    """An event whose data repeats its name."""
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


NATIVE_MESSAGE = {
    "id": "msg_1", "type": "message", "role": "assistant", "model": "up",
    "content": [{"type": "text", "text": "hello"}],
    "stop_reason": "end_turn", "stop_sequence": None,
    "usage": {"input_tokens": 7, "cache_read_input_tokens": 2, "cache_creation_input_tokens": 1, "output_tokens": 4},
}  # fmt: skip
NATIVE_MESSAGE_STREAM = (
    named("message_start", message={**NATIVE_MESSAGE, "content": [], "stop_reason": None,
          "usage": {"input_tokens": 7, "cache_read_input_tokens": 2, "output_tokens": 1}}),
    named("ping"),
    named("content_block_start", index=0, content_block={"type": "thinking", "thinking": "", "signature": ""}),
    named("content_block_delta", index=0, delta={"type": "thinking_delta", "thinking": "hm"}),
    named("content_block_stop", index=0),
    named("content_block_start", index=1, content_block={"type": "text", "text": ""}),
    named("content_block_delta", index=1, delta={"type": "text_delta", "text": "he"}),
    named("content_block_delta", index=1, delta={"type": "text_delta", "text": "llo"}),
    named("content_block_stop", index=1),
    named("message_delta", delta={"stop_reason": "end_turn", "stop_sequence": None}, usage={"output_tokens": 4}),
    named("message_stop"),
)  # fmt: skip

NATIVE_RESPONSE = {
    "id": "resp_1", "object": "response", "created_at": 1, "status": "completed", "model": "up", "tools": [],
    "parallel_tool_calls": True, "tool_choice": "auto",
    "output": [{"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
                "content": [{"type": "output_text", "text": "hello", "annotations": []}]}],
    "usage": {"input_tokens": 9, "input_tokens_details": {"cached_tokens": 2}, "output_tokens": 4,
              "output_tokens_details": {"reasoning_tokens": 1}, "total_tokens": 13},
}  # fmt: skip
_STARTED = {**NATIVE_RESPONSE, "status": "in_progress", "output": [], "usage": None}
_ITEM = {"type": "message", "id": "msg_1", "role": "assistant", "status": "in_progress", "content": []}
_PLACE = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
_PART = {"type": "output_text", "text": "", "annotations": []}
NATIVE_RESPONSE_STREAM = (
    named("response.created", sequence_number=0, response=_STARTED),
    named("response.in_progress", sequence_number=1, response=_STARTED),
    named("response.output_item.added", sequence_number=2, output_index=0, item=_ITEM),
    named("response.content_part.added", sequence_number=3, **_PLACE, part=_PART),
    named("response.output_text.delta", sequence_number=4, **_PLACE, delta="hello", logprobs=[]),
    named("response.output_text.done", sequence_number=5, **_PLACE, text="hello", logprobs=[]),
    named("response.output_item.done", sequence_number=6, output_index=0, item=NATIVE_RESPONSE["output"][0]),
    named("response.completed", sequence_number=7, response=NATIVE_RESPONSE),
)
