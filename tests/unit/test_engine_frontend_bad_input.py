"""Whatever is wrong with a request: a clear error that names the field, and nothing reaches the core."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_harness import MAX_MODEL_LEN, Harness, chat, completion, done, settle

from settings.schema import ModelSettings, ServerSettings

BAD = "invalid_request"
UNBUILT = "unsupported_parameter"
GATEWAY_ID = f"req_{7:024x}"


def user(content: Any) -> list[Any]:
    return [{"role": "user", "content": content}]


IMAGE = [{"type": "text", "text": "what?"}, {"type": "image_url", "image_url": {"url": "http://x/y.png"}}]

CASES: list[tuple[str, Any, int, str, str | None]] = [
    ("/v1/chat/completions", b"{nope", 400, "invalid_json", None),
    ("/v1/chat/completions", b"", 400, "invalid_json", None),
    ("/v1/chat/completions", b'{"a": "\xff"}', 400, "invalid_json", None),
    ("/v1/chat/completions", b'{"a": "\\ud800"}', 400, "invalid_json", None),
    ("/v1/chat/completions", b"[" * 100_000, 400, "invalid_json", None),
    ("/v1/chat/completions", [1], 400, "invalid_json", None),
    ("/v1/chat/completions", chat(model=None), 400, BAD, "model"),
    ("/v1/chat/completions", chat(model=7), 400, BAD, "model"),
    ("/v1/chat/completions", chat(model="gpt-4o"), 404, "model_not_found", "model"),
    ("/v1/chat/completions", chat(messages=None), 400, BAD, "messages"),
    ("/v1/chat/completions", chat(messages=[]), 400, BAD, "messages"),
    ("/v1/chat/completions", chat(messages="hi"), 400, BAD, "messages"),
    ("/v1/chat/completions", chat(messages=["hi"]), 400, BAD, "messages[0]"),
    ("/v1/chat/completions", chat(messages=[{"content": "x"}]), 400, BAD, "messages[0].role"),
    ("/v1/chat/completions", chat(messages=[{"role": "robot", "content": "x"}]), 400, BAD, "messages[0].role"),
    ("/v1/chat/completions", chat(messages=[{"role": "user"}]), 400, BAD, "messages[0].content"),
    ("/v1/chat/completions", chat(messages=user(5)), 400, BAD, "messages[0].content"),
    ("/v1/chat/completions", chat(messages=user(IMAGE)), 400, UNBUILT, "messages[0].content[1]"),
    ("/v1/chat/completions", chat(messages=user(["x"])), 400, BAD, "messages[0].content[0]"),
    ("/v1/chat/completions", chat(messages=[{"role": "tool", "content": "x"}]), 400, BAD, "messages[0].tool_call_id"),
    ("/v1/chat/completions", chat(max_tokens=-1), 400, BAD, "max_tokens"),
    ("/v1/chat/completions", chat(max_tokens=0), 400, BAD, "max_tokens"),
    ("/v1/chat/completions", chat(max_tokens=True), 400, BAD, "max_tokens"),
    ("/v1/chat/completions", chat(max_tokens="9"), 400, BAD, "max_tokens"),
    ("/v1/chat/completions", chat(max_completion_tokens=1.5), 400, BAD, "max_completion_tokens"),
    ("/v1/chat/completions", chat(temperature=-0.1), 400, BAD, "temperature"),
    ("/v1/chat/completions", chat(temperature=2.01), 400, BAD, "temperature"),
    ("/v1/chat/completions", chat(temperature="hot"), 400, BAD, "temperature"),
    ("/v1/chat/completions", chat(top_p=0), 400, BAD, "top_p"),
    ("/v1/chat/completions", chat(top_p=1.1), 400, BAD, "top_p"),
    ("/v1/chat/completions", chat(top_k=-2), 400, BAD, "top_k"),
    ("/v1/chat/completions", chat(top_k=1.0), 400, BAD, "top_k"),
    ("/v1/chat/completions", chat(seed="x"), 400, BAD, "seed"),
    ("/v1/chat/completions", chat(seed=2**70), 400, BAD, "seed"),
    ("/v1/chat/completions", chat(stop=5), 400, BAD, "stop"),
    ("/v1/chat/completions", chat(stop=["a", ""]), 400, BAD, "stop"),
    ("/v1/chat/completions", chat(stop=["a"] * 17), 400, BAD, "stop"),
    ("/v1/chat/completions", chat(stop_token_ids=[999]), 400, BAD, "stop_token_ids"),
    ("/v1/chat/completions", chat(stream="yes"), 400, BAD, "stream"),
    ("/v1/chat/completions", chat(stream=True, stream_options=3), 400, BAD, "stream_options"),
    ("/v1/chat/completions", chat(stream_options={"include_usage": True}), 400, BAD, "stream_options"),
    ("/v1/chat/completions", chat(n=129), 400, BAD, "n"),
    ("/v1/chat/completions", chat(n=0), 400, BAD, "n"),
    ("/v1/chat/completions", chat(logprobs=True), 400, UNBUILT, "logprobs"),
    ("/v1/chat/completions", chat(top_logprobs=3), 400, BAD, "top_logprobs"),
    ("/v1/chat/completions", chat(tools=[{"type": "function"}]), 400, BAD, "tools[0].function.name"),
    ("/v1/chat/completions", chat(tool_choice="required"), 400, BAD, "tool_choice"),
    ("/v1/chat/completions", chat(response_format={"type": "json_object"}), 400, UNBUILT, "response_format"),
    ("/v1/chat/completions", chat(presence_penalty=0.5), 400, UNBUILT, "presence_penalty"),
    ("/v1/chat/completions", chat(frequency_penalty="x"), 400, BAD, "frequency_penalty"),
    ("/v1/chat/completions", chat(repetition_penalty=1.2), 400, UNBUILT, "repetition_penalty"),
    ("/v1/chat/completions", chat(logit_bias={"5": 1}), 400, UNBUILT, "logit_bias"),
    ("/v1/chat/completions", chat(min_p=0.1), 400, UNBUILT, "min_p"),
    ("/v1/completions", completion(best_of=3), 400, UNBUILT, "best_of"),
    ("/v1/completions", completion(echo=True), 400, UNBUILT, "echo"),
    ("/v1/completions", completion(suffix="x"), 400, UNBUILT, "suffix"),
    ("/v1/completions", completion(logprobs=0), 400, UNBUILT, "logprobs"),
    ("/v1/completions", completion(prompt=None), 400, BAD, "prompt"),
    ("/v1/completions", completion(prompt=""), 400, BAD, "prompt"),
    ("/v1/completions", completion(prompt=[]), 400, BAD, "prompt"),
    ("/v1/completions", completion(prompt=5), 400, BAD, "prompt"),
    ("/v1/completions", completion(prompt=["a", "b"]), 400, UNBUILT, "prompt"),
    ("/v1/completions", completion(prompt=[[1], [2]]), 400, UNBUILT, "prompt"),
    ("/v1/completions", completion(prompt=[1, 257]), 400, BAD, "prompt"),
    ("/v1/completions", completion(prompt=[-1]), 400, BAD, "prompt"),
    ("/v1/completions", completion(prompt=[1, "a"]), 400, BAD, "prompt"),
    ("/v1/completions", completion(prompt=[True]), 400, BAD, "prompt"),
    ("/v1/completions", completion(prompt="x" * MAX_MODEL_LEN), 400, "context_length_exceeded", "prompt"),
    ("/v1/embeddings", {"model": "simulated", "input": "x"}, 400, "unsupported_endpoint", None),
    ("/tokenize", {"prompt": 5}, 400, BAD, "prompt"),
    ("/v1/tokenize", {"model": "other", "prompt": "x"}, 404, "model_not_found", "model"),
    ("/detokenize", {"tokens": [300]}, 400, BAD, "tokens"),
    ("/detokenize", {"tokens": "abc"}, 400, BAD, "tokens"),
    ("/api/chat/completions/chat/completions", chat(), 404, "wrong_base_url", None),
    ("/api/v2/chat/completions", chat(), 404, "wrong_base_url", None),
    ("/nowhere", {}, 404, "wrong_base_url", None),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "status", "code", "param"), CASES)
async def test_a_bad_request_gets_its_error(
    tmp_path: Path, path: str, body: Any, status: int, code: str, param: str | None
) -> None:
    harness = Harness(tmp_path)
    call = harness.call(path, body, headers={"x-request-id": "mine-1"})
    await done(call)
    assert (call.status, call.error["code"], call.error["param"]) == (status, code, param)
    assert call.error["request_id"] == call.headers["x-request-id"] == "mine-1"
    assert len(call.error["message"]) > 15
    assert harness.core.sent == []


@pytest.mark.parametrize(("sent", "told"), [(GATEWAY_ID, GATEWAY_ID), ("req_7", "mine-1")])
async def test_an_error_names_the_request_as_the_gateway_does(tmp_path: Path, sent: str, told: str) -> None:
    headers = {"x-request-id": "mine-1", "x-tokenline-request-id": sent}
    call = Harness(tmp_path).call("/v1/completions", completion(temperature=3), headers=headers)
    await done(call)
    assert call.error["request_id"] == call.headers["x-request-id"] == told


async def test_a_prompt_that_is_too_long_is_told_both_counts(tmp_path: Path) -> None:
    call = Harness(tmp_path).call("/v1/completions", completion(prompt="x" * 100))
    await done(call)
    assert "100 tokens" in call.error["message"]
    assert f"{MAX_MODEL_LEN} tokens" in call.error["message"]


async def test_a_prompt_that_cannot_fit_is_refused_without_tokenising_it(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    text = "x" * (256 * MAX_MODEL_LEN + 1)
    for path, body in (
        ("/v1/completions", completion(prompt=text)),
        ("/v1/chat/completions", chat(messages=user(text))),
    ):
        call = harness.call(path, body)
        await done(call)
        assert (call.status, call.error["code"]) == (400, "context_length_exceeded")
        assert f"{len(text)} characters" in call.error["message"]
    assert harness.metric("tokenize_seconds_count") == 0


async def test_an_error_names_what_it_saw(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    wrong_model = harness.call(body=chat(model="gpt-4o"))
    image = harness.call(body=chat(messages=user(IMAGE)))
    negative = harness.call(body=chat(max_tokens=-5))
    await done(wrong_model, image, negative)
    assert "'gpt-4o'" in wrong_model.error["message"]
    assert "'simulated'" in wrong_model.error["message"]
    assert "image_url" in image.error["message"]
    assert "-5" in negative.error["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": False, "n": 1, "tools": [], "logit_bias": {}, "presence_penalty": 0, "tool_choice": "none"},
        {"response_format": {"type": "text"}, "best_of": 1, "repetition_penalty": 1.0, "min_p": 0, "stop": None},
        {"user": "me", "metadata": {"a": 1}, "never_heard_of": [1, 2], "store": True},
        {"top_k": -1, "seed": -5, "temperature": 0, "top_p": 1, "stop": ["a", "b", "c", "d"]},
    ],
)
async def test_parameters_that_ask_for_nothing_and_unknown_ones_are_taken(tmp_path: Path, fields: Any) -> None:
    harness = Harness(tmp_path)
    call = harness.call(body=chat(**fields))
    submit = await harness.submitted(call)
    assert submit.sampling.top_k == 0
    assert submit.sampling.seed is None or submit.sampling.seed >= 0
    call.leave()


async def test_a_body_over_the_limit_is_refused_before_it_is_read(tmp_path: Path) -> None:
    harness = Harness(tmp_path, server=ServerSettings(max_body_bytes=2000))
    declared = harness.call(parts=[b"x" * 1000] * 50, headers={"content-length": "50000"})
    chunked = harness.call(parts=[b"x" * 1000] * 50)
    await settle(3)
    assert (declared.status, declared.error["code"], declared.headers["connection"]) == (413, "body_too_large", "close")
    assert "50000" in declared.error["message"]
    await done(declared, chunked)
    assert (chunked.status, chunked.error["code"]) == (413, "body_too_large")
    assert declared.is_ended
    assert chunked.is_ended


async def test_an_answer_is_cut_to_what_fits(tmp_path: Path) -> None:
    harness = Harness(tmp_path, model=ModelSettings(max_tokens=50))
    asked = [{}, {"max_tokens": 7}, {"max_tokens": 60}, {"max_completion_tokens": 8, "max_tokens": 9}]
    calls = [harness.call("/v1/completions", completion(prompt="x" * 10, **fields)) for fields in asked]
    calls.append(harness.call("/v1/completions", completion(prompt="x" * 60)))
    await settle()
    assert [submit.sampling.max_tokens for submit in harness.core.submits] == [50, 7, 50, 8, 4]
    for call in calls:
        call.leave()


async def test_what_is_asked_for_reaches_the_core(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    body = completion(prompt=[104, 105], temperature=0.5, top_p=0.9, top_k=40, seed=7, stop_token_ids=[3], max_tokens=2)
    call = harness.call("/v1/completions", body)
    sampling = (await harness.submitted(call)).sampling
    assert harness.core.submits[0].prompt == [104, 105]
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.9, 40, 7)
    assert sampling.stop_token_ids == (256, 3)
    ignoring = harness.call("/v1/completions", completion(ignore_eos=True))
    assert (await harness.submitted(ignoring, 1)).sampling.stop_token_ids == ()
    call.leave()
    ignoring.leave()


async def test_text_parts_and_the_developer_role_are_taken(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = harness.call(
        body=chat(messages=[{"role": "developer", "content": "be"}, {"role": "user", "content": parts}])
    )
    submit = await harness.submitted(call)
    assert bytes(submit.prompt) == b"system: be\nuser: a\nb\nassistant: "
    call.leave()


async def test_while_loading_requests_are_told_to_come_back(tmp_path: Path) -> None:
    harness = Harness(tmp_path, is_loaded=False)
    call, health = harness.call(body=chat()), harness.call("/health", method="GET")
    await done(call, health)
    assert (call.status, call.error["code"], call.headers["retry-after"]) == (503, "upstream_unavailable", "2")
    assert (health.status, health.json["status"]) == (503, "loading")
    harness.load()
    health = harness.call("/health", method="GET")
    await done(health)
    assert (health.status, health.json["status"]) == (200, "ok")


async def test_more_requests_than_the_limit_are_refused_at_once(tmp_path: Path) -> None:
    harness = Harness(tmp_path, server=ServerSettings(max_concurrent_requests=2))
    held = [harness.call(body=chat()) for _ in range(2)]
    await settle()
    refused = harness.call(body=chat())
    await done(refused)
    assert (refused.status, refused.error["code"]) == (429, "queue_full")
    held[0].leave()
    await settle()
    await harness.submitted(harness.call(body=chat()), 2)


@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_the_wrong_method_is_named(tmp_path: Path, method: str) -> None:
    call = Harness(tmp_path).call(body=b"", method=method)
    await done(call)
    assert (call.status, call.headers["allow"]) == (405, "POST")


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({}, "missing_key"),
        ({"authorization": "Bearer "}, "missing_key"),
        ({"authorization": "secret"}, "malformed_authorization"),
        ({"authorization": "Basic secret"}, "malformed_authorization"),
        ({"authorization": "Bearer sec ret"}, "key_has_whitespace"),
        ({"authorization": "Bearer secret\n"}, "key_has_whitespace"),
        ({"authorization": "Bearer wrong"}, "unknown_key"),
        ({"authorization": "Bearer secret", "x-api-key": "other"}, "conflicting_credentials"),
        ({"authorization": "Bearer secret"}, None),
        ({"authorization": "bearer secret", "x-api-key": "secret"}, None),
        ({"x-api-key": "secret"}, None),
        ({"api-key": "secret"}, None),
    ],
)
async def test_an_engine_alone_checks_its_key(tmp_path: Path, headers: dict[str, str], code: str | None) -> None:
    harness = Harness(tmp_path, key="secret")
    call = harness.call(body=chat(), headers=headers)
    models = harness.call("/v1/models", method="GET", headers=headers)
    if code is None:
        await harness.submitted(call)
        assert models.status == 200
        call.leave()
        return
    await done(call, models)
    assert (call.status, call.error["code"], call.headers["www-authenticate"]) == (401, code, "Bearer")
    assert models.status == 401
    assert "secret" not in call.error["message"].replace("'server.api_key'", "")


async def test_health_and_metrics_need_no_key(tmp_path: Path) -> None:
    harness = Harness(tmp_path, key="secret")
    calls = [harness.call(path, method="GET") for path in ("/health", "/metrics")]
    await done(*calls)
    assert [call.status for call in calls] == [200, 200]


async def test_models_tokenize_and_detokenize_answer_as_openai_and_vllm_do(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    models = harness.call("/api/models", method="GET")
    one = harness.call("/v1/models/simulated", method="GET")
    none = harness.call("/v1/models/gpt-4o", method="GET")
    tokens = harness.call("/tokenize", {"model": "simulated", "prompt": "hé", "return_token_strs": True})
    messages = harness.call("/v1/tokenize", {"messages": [{"role": "user", "content": "x"}]})
    text = harness.call("/detokenize", {"tokens": list("hé".encode())})
    await done(models, one, none, tokens, messages, text)
    assert [model["id"] for model in models.json["data"]] == ["simulated"]
    assert (one.json["object"], none.status, none.error["code"]) == ("model", 404, "model_not_found")
    assert tokens.json["tokens"] == list("hé".encode())
    assert (tokens.json["count"], tokens.json["max_model_len"]) == (3, MAX_MODEL_LEN)
    assert tokens.json["token_strs"] == ["<0x68>", "<0xC3>", "<0xA9>"]
    assert messages.json["count"] == len(b"user: x\nassistant: ")
    assert text.json == {"prompt": "hé"}
