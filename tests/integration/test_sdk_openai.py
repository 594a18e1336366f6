"""The official openai package against the gateway: what it makes of answers and errors is the test."""

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest
from gateway_rig import chunk, event, rig, stream, whole
from sdk_rig import (
    NATIVE_RESPONSE,
    NATIVE_RESPONSE_STREAM,
    PREFIXES,
    TEXT_STREAM,
    TOOL_ANSWER,
    TOOL_STREAM,
    USAGE,
    WEATHER,
    call_delta,
    chat_answer,
    openai_client,
)

from tracing.ledger import Outcome

USER: Any = [{"role": "user", "content": "hi"}]
RESPONSES_TOOL: Any = {"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}


@pytest.mark.parametrize("prefix", PREFIXES)
async def test_chat_streams_and_whole_answers_work_under_every_prefix(tmp_path: Path, prefix: str) -> None:
    async with rig(tmp_path) as r, openai_client(r, prefix) as client:
        r.upstream.script = whole(TOOL_ANSWER)
        answer = await client.chat.completions.create(model="m", messages=USER)
        calls = answer.choices[0].message.tool_calls
        assert calls is not None
        assert [call.id for call in calls] == ["call_a", "call_b"]
        r.upstream.script = stream(*TOOL_STREAM)
        async with client.chat.completions.stream(model="m", messages=USER) as events:
            final = await events.get_final_completion()
        streamed = final.choices[0].message.tool_calls
        assert streamed is not None
        assert [call.function.arguments for call in streamed] == ['{"city":"Rome"}', '{"city":"Oslo"}']


async def test_embeddings_pass_through_and_their_tokens_are_counted(tmp_path: Path) -> None:
    async with rig(tmp_path) as r, openai_client(r) as client:
        r.upstream.script = whole(
            {
                "object": "list",
                "model": "m",
                "data": [{"object": "embedding", "index": 0, "embedding": [0.5, -1.0]}],
                "usage": {"prompt_tokens": 3, "total_tokens": 3},
            }
        )
        answer = await client.embeddings.create(model="alias", input="hi", encoding_format="float")
        assert answer.data[0].embedding == [0.5, -1.0]
        assert r.upstream.paths == ["/v1/embeddings"]
        assert json.loads(r.upstream.bodies[0])["model"] == "real-name"
        ledger = await r.ledger()
        assert (ledger.surface, ledger.usage.input_tokens) == ("embeddings", 3)


async def test_tokenize_goes_beside_the_upstreams_v1(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        r.upstream.script = whole({"count": 2, "tokens": [1, 2], "max_model_len": 10})
        answer = await r.client.post("/api/v1/tokenize", json={"model": "m", "prompt": "hi"})
        assert answer.json()["tokens"] == [1, 2]
        await r.client.post("/api/detokenize", json={"model": "m", "tokens": [1, 2]})
        assert r.upstream.paths == ["/tokenize", "/detokenize"]


async def test_what_an_upstream_does_not_speak_is_refused_by_name(tmp_path: Path) -> None:
    async with rig(tmp_path, spoken={"surfaces": ["chat"]}) as r, openai_client(r) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.embeddings.create(model="m", input="hi")
        assert refused.value.code == "unsupported_surface"
        assert "/embeddings" in refused.value.message
        assert not r.upstream.bodies


@pytest.mark.parametrize("prefix", PREFIXES)
async def test_a_response_is_translated_from_chat_with_reasoning_text_and_calls(tmp_path: Path, prefix: str) -> None:
    async with rig(tmp_path) as r, openai_client(r, prefix) as client:
        r.upstream.script = whole(TOOL_ANSWER)
        answer = await client.responses.create(
            model="m",
            instructions="Be brief.",
            input=[
                {"role": "user", "content": "Rome?"},
                {"type": "function_call", "call_id": "c0", "name": "weather", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c0", "output": "sunny"},
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "And Oslo?"}]},
            ],
            tools=[RESPONSES_TOOL],
            tool_choice={"type": "function", "name": "weather"},
            text={"format": {"type": "json_schema", "name": "w", "schema": WEATHER, "strict": True}},
            max_output_tokens=50,
            reasoning={"effort": "low"},
            metadata={"a": "b"},
        )
        assert r.upstream.paths == ["/v1/chat/completions"]
        assert json.loads(r.upstream.bodies[0]) == {
            "model": "m",
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Rome?"},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {"id": "c0", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
                    ],
                },
                {"role": "tool", "tool_call_id": "c0", "content": "sunny"},
                {"role": "user", "content": "And Oslo?"},
            ],
            "max_tokens": 50,
            "reasoning_effort": "low",
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "w", "schema": WEATHER, "strict": True},
            },
            "tools": [{"type": "function", "function": {"name": "weather", "parameters": WEATHER, "strict": True}}],
            "tool_choice": {"type": "function", "function": {"name": "weather"}},
        }
        assert [item.type for item in answer.output] == ["reasoning", "message", "function_call", "function_call"]
        assert answer.output_text == "I look."
        assert (answer.status, answer.metadata, answer.model) == ("completed", {"a": "b"}, "m")
        assert answer.usage is not None
        assert answer.usage.input_tokens_details.cached_tokens == 2
        assert answer.usage.total_tokens == 13
        ledger = await r.ledger()
        assert (ledger.surface, ledger.finish_reason, ledger.usage.output_tokens) == ("responses", "tool_calls", 4)


async def test_a_response_streams_in_the_order_that_its_clients_rely_on(tmp_path: Path) -> None:
    async with rig(tmp_path) as r, openai_client(r) as client:
        r.upstream.script = stream(*TOOL_STREAM)
        async with client.responses.stream(model="m", input="hi", tools=[RESPONSES_TOOL]) as events:
            seen = [found async for found in events]
            final = await events.get_final_response()
        kinds = [found.type for found in seen]
        assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
        text = kinds.index("response.output_text.delta")
        assert kinds[text - 2 : text + 4] == [
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
        ]
        assert kinds[-1] == "response.completed"
        assert [found.sequence_number for found in seen] == list(range(len(seen)))
        assert [item.arguments for item in final.output if item.type == "function_call"] == [
            '{"city":"Rome"}',
            '{"city":"Oslo"}',
        ]
        assert final.output_text == "I look."
        assert final.usage is not None
        assert final.usage.output_tokens == USAGE["completion_tokens"]
        ledger = await r.ledger()
        assert ledger.token_events == 6
        assert ledger.first_event <= ledger.first_reasoning <= ledger.first_visible <= ledger.last_token
        assert ledger.first_token_written


async def test_custom_tools_and_namespaces_become_functions_and_their_calls_come_back_as_they_were(
    tmp_path: Path,
) -> None:
    tools: Any = [
        {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: X"}},
        {"type": "namespace", "name": "mcp__files", "description": "", "tools": [RESPONSES_TOOL]},
    ]
    async with rig(tmp_path) as r, openai_client(r) as client:
        r.upstream.script = stream(
            call_delta(0, '{"input":', "a", "patch"),
            call_delta(0, '"*** Begin"}'),
            call_delta(1, '{"city":"Rome"}', "b", "mcp__files__weather"),
            chunk(finish="tool_calls"),
        )
        async with client.responses.stream(model="m", input="hi", tools=tools) as events:
            seen = [found async for found in events]
            final = await events.get_final_response()
        sent = json.loads(r.upstream.bodies[0])["tools"]
        assert [tool["function"]["name"] for tool in sent] == ["patch", "mcp__files__weather"]
        assert "start: X" in sent[0]["function"]["description"]
        assert [found.delta for found in seen if found.type == "response.custom_tool_call_input.delta"] == ["*** Begin"]
        custom, named = final.output
        assert custom.type == "custom_tool_call"
        assert (custom.name, custom.input) == ("patch", "*** Begin")
        assert named.type == "function_call"
        assert (named.name, named.namespace, named.arguments) == ("weather", "mcp__files", '{"city":"Rome"}')
        r.upstream.script = whole(chat_answer())
        turn: Any = [item.model_dump(exclude_none=True) for item in final.output]
        results: Any = [
            {"type": "custom_tool_call_output", "call_id": "a", "output": "done"},
            {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "sunny"}]},
        ]
        await client.responses.create(model="m", input=[*turn, *results], tools=tools)
        messages = json.loads(r.upstream.bodies[1])["messages"]
        assert [call["function"] for call in messages[0]["tool_calls"]] == [
            {"name": "patch", "arguments": '{"input":"*** Begin"}'},
            {"name": "mcp__files__weather", "arguments": '{"city":"Rome"}'},
        ]
        assert [message["content"] for message in messages[1:]] == ["done", "sunny"]


async def test_an_answer_that_max_output_tokens_cut_is_incomplete(tmp_path: Path) -> None:
    async with rig(tmp_path) as r, openai_client(r) as client:
        r.upstream.script = whole(chat_answer("hel", "length"))
        answer = await client.responses.create(model="m", input="hi", max_output_tokens=1)
        assert (answer.status, answer.incomplete_details and answer.incomplete_details.reason) == (
            "incomplete",
            "max_output_tokens",
        )
        r.upstream.script = stream(chunk("hel"), chunk(finish="length"))
        events = await client.responses.create(model="m", input="hi", stream=True)
        last = [found async for found in events][-1]
        assert last.type == "response.incomplete"
        assert last.response.usage is not None
        assert last.response.usage.output_tokens == 1  # no usage came: the token events are the count


async def test_a_native_response_passes_through_byte_for_byte_with_its_marks(tmp_path: Path) -> None:
    async with rig(tmp_path, spoken={"surfaces": ["responses"]}) as r, openai_client(r) as client:
        r.upstream.script = whole(NATIVE_RESPONSE)
        body = b'{"model":"m" ,"input":"hi","previous_response_id":"resp_0"}'
        answer = await r.client.post("/api/responses", content=body)
        assert (r.upstream.bodies[0], r.upstream.paths[0]) == (body, "/v1/responses")
        assert answer.json() == NATIVE_RESPONSE
        first, second, *rest = NATIVE_RESPONSE_STREAM
        r.upstream.script = stream(first, second, 0.03, *rest)
        answer = await r.client.post("/api/responses", json={"model": "m", "input": "hi", "stream": True})
        assert answer.content == b"".join(NATIVE_RESPONSE_STREAM)
        _, ledger = await r.observer.closed(2)
        assert ledger.first_token - ledger.first_event > 25e6
        assert (ledger.token_events, ledger.finish_reason) == (1, "completed")
        assert (ledger.usage.input_tokens, ledger.usage.cached_tokens, ledger.usage.reasoning_tokens) == (9, 2, 1)
        async with client.responses.stream(model="m", input="hi") as events:
            assert (await events.get_final_response()).output_text == "hello"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"input": "x", "previous_response_id": "resp_0"}, "previous_response_id"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": "x", "extra_body": {"novel": 1}}, "novel"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "truncation": "auto"}, "truncation"),
    ],
)
async def test_what_chat_has_no_word_for_is_refused_by_name(tmp_path: Path, fields: Any, named: str) -> None:
    async with rig(tmp_path) as r, openai_client(r) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(model="m", **fields)
        assert refused.value.param == named
        assert named in refused.value.message
        assert not r.upstream.bodies


async def test_errors_become_the_packages_typed_exceptions(tmp_path: Path) -> None:
    async with rig(tmp_path) as r, openai_client(r) as client:
        with pytest.raises(openai.AuthenticationError) as refused:
            await client.with_options(api_key="sk-tl-wrong").responses.create(model="m", input="x")
        assert refused.value.code == "unknown_key"
        with pytest.raises(openai.NotFoundError):
            await client.embeddings.create(model="nope", input="x")
        for status, kind in (
            (400, openai.BadRequestError),
            (429, openai.RateLimitError),
            (500, openai.InternalServerError),
        ):
            r.upstream.script = whole({"error": {"message": "told", "code": "their_code"}}, status=status)
            with pytest.raises(kind) as failed:
                await client.responses.create(model="m", input="x")
            assert failed.value.code == "their_code"


async def test_an_error_after_a_response_began_is_response_failed(tmp_path: Path) -> None:
    async with rig(tmp_path) as r, openai_client(r) as client:
        error = event({"error": {"message": "boom", "code": "context_length_exceeded"}})
        for script in (stream(chunk("a"), error), stream(chunk("a"), 0.05, error), stream(chunk("a"))):
            r.upstream.script = script
            try:
                events = await client.responses.create(model="m", input="hi", stream=True)
            except openai.InternalServerError:
                continue  # the error came in one read with the first event: told with a status
            seen = [found async for found in events]
            last = seen[-1]
            assert last.type == "response.failed"
            assert last.sequence_number == len(seen) - 1
            assert last.response.id == seen[0].response.id
            assert last.response.error is not None
            assert last.response.error.code in {"context_length_exceeded", "server_error"}
        async with asyncio.timeout(5):
            ledgers = await r.observer.closed(3)
        assert {ledger.outcome for ledger in ledgers} == {Outcome.UPSTREAM_ERROR}


async def test_a_call_that_goes_back_to_an_earlier_one_fails_clearly(tmp_path: Path) -> None:
    async with rig(tmp_path) as r, openai_client(r) as client:
        r.upstream.script = stream(
            call_delta(0, "{", "a", "f"), 0.02, call_delta(1, "{}", "b", "f"), 0.02, call_delta(0, "}")
        )
        events = await client.responses.create(model="m", input="hi", stream=True)
        last = [found async for found in events][-1]
        assert last.type == "response.failed"


async def test_text_streams_give_one_usage_on_chat(tmp_path: Path) -> None:
    async with rig(tmp_path) as r, openai_client(r) as client:
        r.upstream.script = stream(*TEXT_STREAM)
        chunks = await client.chat.completions.create(
            model="m", messages=USER, stream=True, stream_options={"include_usage": True}
        )
        assert len([found.usage async for found in chunks if found.usage]) == 1
