"""Translators between surfaces: whatever comes in, in whatever pieces, what goes out is one well-formed answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.surfaces.catalogue import COUNT_TOKENS, MESSAGES, RESPONSES
from gateway.surfaces.responses_tools import chat_tools, known_tools
from gateway.surfaces.surface import Dialect, Surface
from protocol.errors import ApiError
from protocol.responses import decode_tools
from tracing.ledger import Attempt, Ledger

FAST = settings(max_examples=60, deadline=None)
USAGE = {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 2}}
ASKED = {
    "messages": {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}], "stream": True,
                 "thinking": {"type": "enabled", "budget_tokens": 1024}},
    "responses": {"model": "m", "input": "x", "stream": True},
}  # fmt: skip


def new_ledger() -> Ledger:
    found = Ledger(request_id="req_1", trace_id="1" * 32, span_id="1" * 16, wall_ns=10**18, ingress=1)
    found.attempts.append(Attempt(1, "a", "m", "2" * 16))
    return found


def translator(surface: Surface) -> Dialect:
    assert surface.fallback is not None
    return surface.fallback.dialect


def status_of(attempt: Callable[[], object]) -> int:
    """200, or the status of its refusal; anything else that is raised is a fault."""
    try:
        attempt()
    except ApiError as error:
        return error.status if error.message else 0
    return 200


# A chat answer, as a row of pieces: (kind, text) with kind reasoning, text or call; a call's text is its argument.
words = st.text(min_size=1, max_size=8)
answers = st.lists(st.tuples(st.sampled_from(["reasoning", "text", "call"]), words), max_size=6)
reasons = st.sampled_from(["stop", "length", "tool_calls", "content_filter"])


def chat_events(row: list[tuple[str, str]], reason: str, *, with_comments: bool) -> bytes:
    """The answer as a chat stream; each text comes in two deltas."""
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    for index, (kind, text) in enumerate(row):
        if kind == "call":
            arguments = json.dumps({"x": text})
            head = {"index": index, "id": f"c{index}", "type": "function", "function": {"name": "f", "arguments": ""}}
            deltas.append({"tool_calls": [head]})
            deltas += [
                {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}
                for piece in (arguments[:3], arguments[3:])
            ]
        else:
            name = "content" if kind == "text" else "reasoning_content"
            deltas += [{name: piece} for piece in (text[:1], text[1:])]
    events: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
    events.append({"choices": [], "usage": USAGE})
    comment = b": alive\n\n" if with_comments else b""
    lines = [b"data: " + json.dumps(event).encode() + b"\n\n" + comment for event in events]
    return b"".join(lines) + b"data: [DONE]\n\n"


def joined(row: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The row as blocks: neighbours of one kind are one block, calls stay apart."""
    blocks: list[tuple[str, str]] = []
    for kind, text in row:
        if blocks and kind != "call" and blocks[-1][0] == kind:
            blocks[-1] = (kind, blocks[-1][1] + text)
        else:
            blocks.append((kind, text))
    return blocks


def events_of(stream: bytes) -> list[dict[str, Any]]:
    found = []
    for block in stream.decode().split("\n\n")[:-1]:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def relay(surface: Surface, stream: bytes, cuts: list[int]) -> tuple[list[dict[str, Any]], Ledger]:
    """What the client gets of the stream, cut at these places."""
    ledger = new_ledger()
    request = surface.parse(json.dumps(ASKED[surface.name]).encode(), b"")
    taking = translator(surface).stream(ledger, request, keep_timings=False)
    places = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    out = [taking.feed(stream[a:b], b) for a, b in pairwise(places)]
    out.append(taking.end(len(stream)))
    assert taking.done
    return events_of(b"".join(out)), ledger


@FAST
@given(answers, reasons, st.lists(st.integers(0, 10_000), max_size=8), st.booleans())
def test_a_stream_cut_anywhere_becomes_messages_blocks_that_open_grow_and_close_in_turn(
    row: list[tuple[str, str]], reason: str, cuts: list[int], with_comments: bool
) -> None:
    events, ledger = relay(MESSAGES, chat_events(row, reason, with_comments=with_comments), cuts)
    events = [event for event in events if event["type"] != "ping"]
    assert events[0]["type"] == "message_start"
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    blocks: list[tuple[str, str]] = []
    open_index: int | None = None
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert (open_index, event["index"]) == (None, len(blocks))
            open_index = event["index"]
            kinds = {"thinking": "reasoning", "tool_use": "call"}
            blocks.append((kinds.get(event["content_block"]["type"], "text"), ""))
        elif event["type"] == "content_block_delta":
            assert event["index"] == open_index
            delta = event["delta"]
            piece = delta.get("text") or delta.get("thinking") or delta["partial_json"]
            blocks[-1] = (blocks[-1][0], blocks[-1][1] + piece)
        else:
            assert (event["type"], event["index"]) == ("content_block_stop", open_index)
            open_index = None
    assert open_index is None
    told = [(kind, json.loads(text)["x"] if kind == "call" else text) for kind, text in blocks]
    assert told == joined(row)
    assert events[-2]["usage"] == {"input_tokens": 7, "output_tokens": 4, "cache_read_input_tokens": 2}
    assert ledger.finish_reason == reason


@FAST
@given(answers, reasons, st.lists(st.integers(0, 10_000), max_size=8))
def test_a_stream_cut_anywhere_becomes_response_events_whose_sum_is_the_final_response(
    row: list[tuple[str, str]], reason: str, cuts: list[int]
) -> None:
    events, _ = relay(RESPONSES, chat_events(row, reason, with_comments=True), cuts)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    final = events[-1]["response"]
    assert events[-1]["type"] == f"response.{final['status']}"
    grown: dict[int, str] = {}
    done: dict[int, dict[str, Any]] = {}
    for event in events[2:-1]:
        index = event["output_index"]
        if event["type"] == "response.output_item.added":
            assert index == len(done)
            grown[index] = ""
        elif event["type"].endswith(".delta"):
            grown[index] += event["delta"]
        elif event["type"] == "response.output_item.done":
            done[index] = event["item"]
    assert [item["id"] for item in final["output"]] == [item["id"] for item in done.values()]
    texts = [item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
             for item in final["output"]]  # fmt: skip
    assert texts == list(grown.values())
    assert len(texts) == len(joined(row))


@FAST
@given(answers.filter(bool), st.sampled_from([MESSAGES, RESPONSES]))
def test_a_whole_answer_given_back_as_the_next_prompt_is_the_same_turn(
    row: list[tuple[str, str]], surface: Surface
) -> None:
    message: dict[str, Any] = {"role": "assistant", "content": "".join(t for k, t in row if k == "text") or None}
    calls = [
        {"id": f"c{i}", "type": "function", "function": {"name": "f", "arguments": json.dumps({"x": t})}}
        for i, (k, t) in enumerate(row)
        if k == "call"
    ]
    if calls:
        message["tool_calls"] = calls
    if message["content"] is None and not calls:
        message["content"] = "x"
    body = json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}).encode()
    asked = ASKED[surface.name]
    request = surface.parse(json.dumps(asked).encode(), b"")
    answer = json.loads(translator(surface).whole(new_ledger(), request, body, keep_timings=False))
    after = {"role": "user", "content": "next"}
    if surface is MESSAGES:
        again = {**asked, "messages": [{"role": "assistant", "content": answer["content"]}, after]}
    else:
        again = {**asked, "input": [*answer["output"], after]}
    sent = json.loads(translator(surface).body(surface.parse(json.dumps(again).encode(), b""), "m"))
    turn = sent["messages"][0]
    for call in (*turn.get("tool_calls", ()), *calls):
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    assert (turn["content"], turn.get("tool_calls", [])) == (message["content"], calls)
    assert sent["messages"][1:] == [after]


floats = st.floats(allow_nan=False, allow_infinity=False)
scalars = st.none() | st.booleans() | st.integers(-5, 5) | floats | st.text(max_size=5)
KEYS = st.sampled_from(
    ["type", "role", "content", "text", "name", "id", "input", "arguments", "call_id", "tool_use_id", "function",
     "tool_calls", "index", "delta", "source", "image_url", "output", "format", "schema", "novel"]
)  # fmt: skip
VALUES = st.sampled_from(
    ["user", "assistant", "text", "tool_use", "tool_result", "function", "function_call", "message", "input_text",
     "image", "base64", "thinking", "json_schema", "item_reference"]
)  # fmt: skip
junk = st.recursive(
    scalars | VALUES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=8,
)
FIELDS = sorted(
    {"messages", "system", "tools", "tool_choice", "thinking", "max_tokens", "stop_sequences", "metadata", "input",
     "instructions", "text", "reasoning", "temperature", "output_config", "previous_response_id", "stream"}
)  # fmt: skip


@settings(max_examples=250, deadline=None)
@given(st.dictionaries(st.sampled_from(FIELDS), junk, max_size=5), st.sampled_from([MESSAGES, RESPONSES, COUNT_TOKENS]))
def test_any_request_is_translated_or_refused_with_a_400(fields: dict[str, Any], surface: Surface) -> None:
    base: dict[str, Any] = {"model": "m", "messages": []} if surface is COUNT_TOKENS else dict(ASKED[surface.name])
    body = json.dumps({**base, **fields}).encode()

    def translate() -> None:
        request = surface.parse(body, b"")
        made = json.loads(translator(surface).body(request, "up"))
        translator(surface).stream(new_ledger(), request, keep_timings=False)
        assert made["model"] == "up"
        assert isinstance(made["messages"], list)

    assert status_of(translate) in (200, 400)


@settings(max_examples=250, deadline=None)
@given(st.lists(junk, max_size=4), st.sampled_from([MESSAGES, RESPONSES]))
def test_any_chat_event_is_translated_or_is_the_upstreams_error(events: list[Any], surface: Surface) -> None:
    request = surface.parse(json.dumps(ASKED[surface.name]).encode(), b"")
    taking = translator(surface).stream(new_ledger(), request, keep_timings=False)
    for found in events:
        for event in (found, {"choices": [{"delta": found}]}, {"choices": found, "usage": found}):
            data = b"data: " + json.dumps(event).encode() + b"\n\n"
            status = status_of(lambda data=data: events_of(taking.feed(data, 5)))
            assert status in (200, 502)
            if status == 502:
                return


@settings(max_examples=150, deadline=None)
@given(junk, st.sampled_from([MESSAGES, RESPONSES, COUNT_TOKENS]))
def test_any_whole_answer_is_translated_or_is_the_upstreams_error(found: Any, surface: Surface) -> None:
    asked = {"model": "m", "messages": []} if surface is COUNT_TOKENS else ASKED[surface.name]
    request = surface.parse(json.dumps(asked).encode(), b"")
    for body in (found, {"choices": [{"message": found, "finish_reason": "stop"}]}):
        data = json.dumps(body).encode()
        status = status_of(lambda data=data: translator(surface).whole(new_ledger(), request, data, keep_timings=False))
        assert status in (200, 502)


@FAST
@given(st.lists(junk, max_size=5), st.lists(st.integers(0, 10_000), max_size=5), st.sampled_from([MESSAGES, RESPONSES]))
def test_native_events_pass_byte_for_byte_however_they_are_cut(
    events: list[Any], cuts: list[int], surface: Surface
) -> None:
    kinds = ["content_block_delta", "response.output_text.delta", "message_start"]
    stream = b"".join(
        f"event: {kind}\ndata: {json.dumps({'type': kind, 'delta': found, 'message': found})}\n\n".encode()
        for kind, found in zip(kinds * 2, events, strict=False)
    )
    request = surface.parse(json.dumps(ASKED[surface.name]).encode(), b"")
    taking = surface.native.stream(new_ledger(), request, keep_timings=False)
    places = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    out = [taking.feed(stream[a:b], b) for a, b in pairwise(places)]
    assert b"".join(out) + taking.end(1) == stream


def test_a_call_whose_index_never_changes_is_told_apart_by_its_id() -> None:
    calls = [{"index": 0, "id": i, "function": {"name": "f", "arguments": "{}"}} for i in ("a", "b")]
    stream = b"".join(
        b"data: " + json.dumps({"choices": [{"delta": {"tool_calls": [call]}}]}).encode() + b"\n\n" for call in calls
    )
    events, _ = relay(MESSAGES, stream + b"data: [DONE]\n\n", [])
    started = [event["content_block"]["id"] for event in events if event["type"] == "content_block_start"]
    assert started == ["a", "b"]


def test_arguments_that_are_no_json_are_the_upstreams_error_unless_they_were_cut_off() -> None:
    call = {"id": "a", "function": {"name": "f", "arguments": '{"x'}}
    request = MESSAGES.parse(json.dumps(ASKED["messages"]).encode(), b"")

    def whole(reason: str) -> Any:
        choice = {"message": {"tool_calls": [call]}, "finish_reason": reason}
        body = json.dumps({"choices": [choice]}).encode()
        return json.loads(translator(MESSAGES).whole(new_ledger(), request, body, keep_timings=False))

    assert whole("length")["content"][0]["input"] == {}
    with pytest.raises(ApiError, match="no JSON object"):
        whole("tool_calls")


def test_a_tools_name_that_chat_finds_too_long_is_cut_and_still_its_own() -> None:
    inner = [{"type": "function", "name": "read" + "x" * 20}, {"type": "custom", "name": "read" + "x" * 19 + "y"}]
    tools = decode_tools(json.dumps([{"type": "namespace", "name": "n" * 60, "tools": inner}]))
    assert tools is not None
    known = known_tools(tools)
    assert sorted(known) == sorted(tool["function"]["name"] for tool in chat_tools(tools))
    assert len(known) == 2
    assert max(map(len, known)) == 64
    assert {(tool.namespace, tool.is_custom) for tool in known.values()} == {("n" * 60, False), ("n" * 60, True)}


def test_requests_that_begin_alike_have_the_same_opening_on_every_surface() -> None:
    for surface, fields in (
        (MESSAGES, {"system": "s", "messages": [1]}),
        (RESPONSES, {"instructions": "s", "input": [1]}),
    ):
        first, second = (
            surface.parse(json.dumps({"model": model, **fields}).encode(), b"").opening for model in ("a", "b")
        )
        assert first == second == b'"s"[1]'
