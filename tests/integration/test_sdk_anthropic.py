"""The official anthropic package against the gateway: what it makes of answers and errors is the test."""

import json
from pathlib import Path
from typing import Any

import anthropic
import pytest
from gateway_rig import KEY, chunk, event, rig, stream, whole
from sdk_rig import (
    NATIVE_MESSAGE,
    NATIVE_MESSAGE_STREAM,
    PREFIXES,
    TEXT_STREAM,
    TOOL_ANSWER,
    TOOL_STREAM,
    WEATHER,
    anthropic_client,
    chat_answer,
)

from tracing.ledger import Outcome

USER: Any = [{"role": "user", "content": "hi"}]
TOOL: Any = {"name": "weather", "description": "Tells.", "input_schema": WEATHER}
THINKING: Any = {"type": "enabled", "budget_tokens": 1024}


@pytest.mark.parametrize("prefix", PREFIXES)
async def test_a_message_is_translated_from_chat_with_thinking_text_and_calls(tmp_path: Path, prefix: str) -> None:
    async with rig(tmp_path) as r, anthropic_client(r, prefix) as client:
        r.upstream.script = whole(TOOL_ANSWER)
        conversation: Any = [
            {"role": "user", "content": [{"type": "text", "text": "Rome?", "cache_control": {"type": "ephemeral"}}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "t0", "name": "weather", "input": {"city": "Rome"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t0", "content": "no such city", "is_error": True},
                    {"type": "text", "text": "Look again."},
                    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
                ],
            },
        ]
        answer = await client.messages.create(
            model="m",
            max_tokens=50,
            system=[{"type": "text", "text": "Be brief."}],
            messages=conversation,
            tools=[TOOL],
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
            stop_sequences=["END"],
            extra_body={"temperature": 0.5},
            thinking=THINKING,
            metadata={"user_id": "u"},
        )
        assert json.loads(r.upstream.bodies[0]) == {
            "model": "m",
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Rome?"},
                {
                    "role": "assistant",
                    "content": "I look.",
                    "tool_calls": [
                        {
                            "id": "t0",
                            "type": "function",
                            "function": {"name": "weather", "arguments": '{"city":"Rome"}'},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": "t0", "content": "Error: no such city"},
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "Look again."},
                        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
                    ],
                },
            ],
            "tools": [
                {
                    "type": "function",
                    "function": {"name": "weather", "description": "Tells.", "parameters": WEATHER},
                }
            ],
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "stop": ["END"],
            "temperature": 0.5,
            "max_tokens": 50,
            "user": "u",
        }
        assert [block.type for block in answer.content] == ["thinking", "text", "tool_use", "tool_use"]
        call = answer.content[2]
        assert call.type == "tool_use"
        assert (call.id, call.name, call.input) == ("call_a", "weather", {"city": "Rome"})
        assert (answer.stop_reason, answer.model) == ("tool_use", "m")
        assert (answer.usage.input_tokens, answer.usage.cache_read_input_tokens, answer.usage.output_tokens) == (
            7,
            2,
            4,
        )
        ledger = await r.ledger()
        assert answer._request_id == ledger.request_id
        assert (ledger.surface, ledger.usage.input_tokens) == ("messages", 9)


async def test_a_message_streams_block_by_block(tmp_path: Path) -> None:
    async with rig(tmp_path) as r, anthropic_client(r) as client:
        r.upstream.script = stream(*TOOL_STREAM)
        async with client.messages.stream(
            model="m", max_tokens=50, messages=USER, tools=[TOOL], thinking=THINKING
        ) as events:
            kinds = [found.type async for found in events if found.type.startswith(("message_", "content_block_"))]
            final = await events.get_final_message()
        assert kinds[0] == "message_start"
        assert kinds[-2:] == ["message_delta", "message_stop"]
        starts = [index for index, kind in enumerate(kinds) if kind == "content_block_start"]
        stops = [index for index, kind in enumerate(kinds) if kind == "content_block_stop"]
        assert len(starts) == len(stops) == 4
        assert sorted(starts + stops) == [index for pair in zip(starts, stops, strict=True) for index in pair]
        assert [block.input for block in final.content if block.type == "tool_use"] == [
            {"city": "Rome"},
            {"city": "Oslo"},
        ]
        assert final.stop_reason == "tool_use"
        assert (final.usage.input_tokens, final.usage.output_tokens) == (7, 4)
        ledger = await r.ledger()
        assert ledger.token_events == 6
        assert ledger.first_event <= ledger.first_reasoning <= ledger.first_visible
        assert ledger.first_token_written


async def test_reasoning_stays_hidden_from_a_client_that_asked_for_no_thinking_and_is_still_the_first_token(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path) as r, anthropic_client(r) as client:
        role, reasoning, *rest = TOOL_STREAM
        r.upstream.script = stream(role, 0.03, reasoning, 0.03, *rest)
        async with client.messages.stream(model="m", max_tokens=50, messages=USER) as events:
            final = await events.get_final_message()
        assert [block.type for block in final.content] == ["text", "tool_use", "tool_use"]
        ledger = await r.ledger()
        assert ledger.first_token == ledger.first_reasoning
        assert ledger.first_token - ledger.first_event > 25e6
        assert ledger.first_visible - ledger.first_token > 25e6


async def test_a_stop_string_that_the_upstream_names_is_the_stop_sequence(tmp_path: Path) -> None:
    async with rig(tmp_path) as r, anthropic_client(r) as client:
        answer = chat_answer()
        answer["choices"][0]["stop_reason"] = "END"
        r.upstream.script = whole(answer)
        found = await client.messages.create(model="m", max_tokens=5, messages=USER, stop_sequences=["END"])
        assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", "END")


async def test_a_comment_of_the_upstream_becomes_a_ping(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        r.upstream.script = stream(TEXT_STREAM[0], b": alive\n\n", *TEXT_STREAM[1:])
        body = {"model": "m", "max_tokens": 5, "messages": USER, "stream": True}
        answer = await r.client.post("/api/v1/messages", json=body)
        assert answer.text.count("event: ping") == 2  # one follows message_start
        assert ": alive" not in answer.text
        assert answer.text.count('"usage":{') == 2  # message_start's zeros, message_delta's counts


async def test_a_native_message_passes_through_byte_for_byte_with_its_marks(tmp_path: Path) -> None:
    async with (
        rig(tmp_path, spoken={"surfaces": ["messages", "count_tokens"]}) as r,
        anthropic_client(r) as client,
    ):
        r.upstream.script = whole(NATIVE_MESSAGE)
        body = b'{"model":"m" ,"max_tokens":5,"messages":[],"novel":1}'
        headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "a,b"}
        answer = await r.client.post("/api/v1/messages?beta=true&key=secret", content=body, headers=headers)
        assert answer.json() == NATIVE_MESSAGE
        assert (r.upstream.bodies[0], r.upstream.paths[0]) == (body, "/v1/messages?beta=true")
        assert headers.items() <= r.upstream.headers[0].items()
        start, *rest = NATIVE_MESSAGE_STREAM
        r.upstream.script = stream(start, 0.03, *rest)
        answer = await r.client.post("/api/v1/messages", content=b'{"model":"m","stream":true}')
        assert answer.content == b"".join(NATIVE_MESSAGE_STREAM)
        whole_ledger, ledger = await r.observer.closed(2)
        assert (whole_ledger.usage.input_tokens, whole_ledger.usage.cached_tokens) == (10, 2)
        assert ledger.first_token - ledger.first_event > 25e6
        assert ledger.first_token == ledger.first_reasoning
        assert (ledger.token_events, ledger.finish_reason) == (3, "end_turn")
        assert (ledger.usage.input_tokens, ledger.usage.output_tokens, ledger.usage.source) == (9, 4, "usage")
        async with client.messages.stream(model="m", max_tokens=5, messages=USER) as events:
            assert (await events.get_final_message()).content[1].text == "hello"  # type: ignore[union-attr]
        r.upstream.script = whole({"input_tokens": 12})
        assert (await client.messages.count_tokens(model="m", messages=USER)).input_tokens == 12
        assert r.upstream.paths[-1] == "/v1/messages/count_tokens"


async def test_an_upstreams_key_goes_where_it_wants_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UP_KEY", "sk-ant-secret")
    spoken = {"surfaces": ["messages"], "api_key_env": "UP_KEY", "api_key_header": "x-api-key"}
    async with rig(tmp_path, spoken=spoken) as r, anthropic_client(r) as client:
        r.upstream.script = whole(NATIVE_MESSAGE)
        await client.messages.create(model="m", max_tokens=5, messages=USER)
        assert r.upstream.headers[0]["x-api-key"] == "sk-ant-secret"
        assert "authorization" not in r.upstream.headers[0]
        assert KEY not in json.dumps(r.upstream.headers[0])


async def test_tokens_are_counted_by_the_upstreams_tokenizer_where_it_has_one(tmp_path: Path) -> None:
    async with rig(tmp_path) as r, anthropic_client(r) as client:
        r.upstream.script = whole({"count": 7, "max_model_len": 10, "tokens": [1] * 7})
        counted = await client.messages.count_tokens(model="alias", system="s", messages=USER, tools=[TOOL])
        assert counted.input_tokens == 7
        assert r.upstream.paths == ["/tokenize"]
        asked = json.loads(r.upstream.bodies[0])
        assert asked["model"] == "real-name"
        assert [message["role"] for message in asked["messages"]] == ["system", "user"]
        assert asked["tools"][0]["function"]["name"] == "weather"


async def test_an_upstream_without_the_tokenizer_that_its_settings_promise_is_named(tmp_path: Path) -> None:
    async with rig(tmp_path) as r, anthropic_client(r) as client:
        r.upstream.script = whole({"detail": "Not Found"}, status=404)
        with pytest.raises(anthropic.BadRequestError, match="take tokenize out of its"):
            await client.messages.count_tokens(model="m", messages=USER)


async def test_tokens_can_not_be_counted_without_a_tokenizer(tmp_path: Path) -> None:
    async with rig(tmp_path, spoken={"surfaces": ["chat"]}) as r, anthropic_client(r) as client:
        with pytest.raises(anthropic.BadRequestError, match="names no count_tokens or tokenize"):
            await client.messages.count_tokens(model="m", messages=USER)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "search_result", "source": "x"}]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": [*USER, {"role": "assistant", "content": "{"}]}, "messages[1]"),
        ({"extra_body": {"container": "c"}}, "container"),
        ({"max_tokens": "five"}, "max_tokens"),
    ],
)
async def test_what_chat_has_no_word_for_is_refused_by_name(tmp_path: Path, fields: Any, named: str) -> None:
    async with rig(tmp_path) as r, anthropic_client(r) as client:
        asked: Any = {"model": "m", "max_tokens": 5, "messages": USER, **fields}
        with pytest.raises(anthropic.BadRequestError) as refused:
            await client.messages.create(**asked)
        assert f"'{named}'" in str(refused.value)
        assert refused.value.type == "invalid_request_error"
        assert not r.upstream.bodies


async def test_errors_become_the_packages_typed_exceptions(tmp_path: Path) -> None:
    async with rig(tmp_path) as r, anthropic_client(r) as client:
        asked: Any = {"model": "m", "max_tokens": 5, "messages": USER}
        with pytest.raises(anthropic.AuthenticationError) as refused:
            await client.with_options(api_key="sk-tl-wrong").messages.create(**asked)
        body: Any = refused.value.body
        assert body["type"] == "error"
        assert body["error"]["type"] == "authentication_error"
        assert body["request_id"] == refused.value.request_id == (await r.ledger()).request_id
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(**asked | {"model": "nope"})
        for status, kind in (
            (400, anthropic.BadRequestError),
            (429, anthropic.RateLimitError),
            (500, anthropic.InternalServerError),
            (529, anthropic.InternalServerError),
        ):
            r.upstream.script = whole({"error": {"message": "told", "code": "their_code"}}, status=status)
            with pytest.raises(kind) as failed:
                await client.messages.create(**asked)
            body = failed.value.body
            assert (body["type"], body["error"]["message"]) == ("error", "told")


async def test_an_error_after_a_message_began_is_an_error_event(tmp_path: Path) -> None:
    async with rig(tmp_path) as r, anthropic_client(r) as client:
        error = event({"error": {"message": "boom", "code": "x"}})
        for script in (stream(chunk("a"), 0.05, error), stream(chunk("a"), 0.05)):
            r.upstream.script = script
            seen: list[str] = []
            events = await client.messages.create(model="m", max_tokens=5, messages=USER, stream=True)
            with pytest.raises(anthropic.APIStatusError) as failed:
                await keep_kinds(events, seen)
            body: Any = failed.value.body
            assert body["error"]["type"] == "api_error"
            assert seen[0] == "message_start"
            assert "message_stop" not in seen
        assert {ledger.outcome for ledger in await r.observer.closed(2)} == {Outcome.UPSTREAM_ERROR}


async def keep_kinds(events: Any, seen: list[str]) -> None:
    async for found in events:
        seen += [found.type]  # one by one, so that those before an error stay


async def test_models_are_listed_in_the_shape_that_the_client_reads(tmp_path: Path) -> None:
    async with rig(tmp_path) as r, anthropic_client(r) as client:
        models = [model.id async for model in client.models.list()]
        assert models == ["m", "alias"]
        assert (await client.models.retrieve("alias")).display_name == "alias"
        with pytest.raises(anthropic.NotFoundError):
            await client.models.retrieve("nope")
        assert (await r.client.get("/api/models")).json()["object"] == "list"


async def test_claude_codes_greeting_is_answered_without_a_key(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        for path in ("/api/hello", "/api/api/hello", "/v1/api/hello"):
            answer = await r.client.head(path, headers={"authorization": ""}, timeout=3)
            assert answer.status_code == 200


async def test_the_description_of_what_is_served_is_there_without_a_key(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        answer = await r.client.get("/api/openapi.json", headers={"authorization": ""})
        assert answer.json()["servers"] == [{"url": r.settings.advertised_base_url}]
        assert "/messages/count_tokens" in answer.json()["paths"]
