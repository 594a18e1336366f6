"""What can't be had is refused with field, value and range; what the core does not do is never ignored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_harness import FEATURES, WEATHER, Harness, ToolTokenizer, chat, completion, done, settle

FORMAT = {"type": "json_object"}
WRONG = {"type": "function", "function": {"name": "f", "parameters": {"type": "objekt"}}}
REFUSED: list[tuple[dict[str, Any], str, str, str]] = [
    ({"min_p": -0.1}, "invalid_request", "min_p", "from 0 to 1"),
    ({"min_p": 1.5}, "invalid_request", "min_p", "1.5"),
    ({"repetition_penalty": 0}, "invalid_request", "repetition_penalty", "above 0"),
    ({"repetition_penalty": 11}, "invalid_request", "repetition_penalty", "11"),
    ({"presence_penalty": 2.1}, "invalid_request", "presence_penalty", "from -2 to 2"),
    ({"frequency_penalty": -2.1}, "invalid_request", "frequency_penalty", "-2.1"),
    ({"logit_bias": [1]}, "invalid_request", "logit_bias", "object"),
    ({"logit_bias": {"x": 1}}, "invalid_request", "logit_bias", "x"),
    ({"logit_bias": {"-1": 1}}, "invalid_request", "logit_bias", "-1"),
    ({"logit_bias": {"300": 1}}, "invalid_request", "logit_bias", "256"),
    ({"logit_bias": {"5": 101}}, "invalid_request", "logit_bias", "from -100 to 100"),
    ({"logit_bias": {"5": "a"}}, "invalid_request", "logit_bias", "number"),
    ({"logit_bias": {str(at): 1 for at in range(2000)}}, "invalid_request", "logit_bias", "2000"),
    ({"logprobs": 1}, "invalid_request", "logprobs", "true or false"),
    ({"logprobs": True, "top_logprobs": 21}, "invalid_request", "top_logprobs", "at most 20"),
    ({"top_logprobs": 2}, "invalid_request", "top_logprobs", "'logprobs': true"),
    ({"n": 1.5}, "invalid_request", "n", "whole number"),
    ({"n": 2, "best_of": 3}, "unsupported_parameter", "best_of", "3"),
    ({"min_tokens": -1}, "invalid_request", "min_tokens", "at least 0"),
    ({"min_tokens": 9, "max_tokens": 8}, "invalid_request", "min_tokens", "at most"),
    ({"max_completion_tokens": 0}, "invalid_request", "max_completion_tokens", "at least 1"),
    ({"ignore_eos": 1}, "invalid_request", "ignore_eos", "true or false"),
    ({"stop_token_ids": [*range(70)]}, "invalid_request", "stop_token_ids", "71"),
    ({"response_format": "json"}, "invalid_request", "response_format", "json_schema"),
    ({"response_format": {"type": "xml"}}, "invalid_request", "response_format", "xml"),
    ({"response_format": {"type": "json_schema"}}, "invalid_request", "response_format.json_schema.schema", "schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "objekt"}}}},
        "invalid_request",
        "response_format",
        "objekt",
    ),
    ({"response_format": FORMAT, "ignore_eos": True}, "invalid_request", "ignore_eos", "response_format"),
    ({"response_format": FORMAT, "min_tokens": 3}, "invalid_request", "min_tokens", "response_format"),
    ({"response_format": FORMAT, "tools": [WEATHER]}, "unsupported_parameter", "response_format", "tools"),
    ({"tools": {}}, "invalid_request", "tools", "list"),
    ({"tools": [{"type": "web_search"}]}, "unsupported_parameter", "tools[0]", "web_search"),
    (
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        "invalid_request",
        "tools[0].function.name",
        "a b",
    ),
    ({"tools": [WRONG], "tool_choice": "required"}, "invalid_request", "tools", "objekt"),
    ({"tools": [WEATHER], "tool_choice": "always"}, "invalid_request", "tool_choice", "always"),
    (
        {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}},
        "invalid_request",
        "tool_choice",
        "'x'",
    ),
    ({"tools": [WEATHER], "parallel_tool_calls": False}, "unsupported_parameter", "parallel_tool_calls", "false"),
    ({"tools": [WEATHER], "logprobs": True}, "unsupported_parameter", "logprobs", "tools"),
    ({"functions": [{}]}, "unsupported_parameter", "functions", "tools"),
    (
        {"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]},
        "invalid_request",
        "messages[0].tool_calls",
        "assistant",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
        "invalid_request",
        "messages[0].tool_calls[0].function.arguments",
        "JSON",
    ),
]


@pytest.mark.parametrize(("fields", "code", "param", "says"), REFUSED)
async def test_what_cannot_be_had_is_told_with_field_value_and_range(
    tmp_path: Path, fields: dict[str, Any], code: str, param: str, says: str
) -> None:
    here = Harness(tmp_path, features=FEATURES, tokenizer=ToolTokenizer())
    call = here.call(body=chat(**fields))
    await done(call)
    assert (call.status, call.error["code"], call.error["param"]) == (400, code, param)
    assert says in call.error["message"]
    assert here.core.sent == []


LARGEST = 2**31 - 1
RANGES: list[tuple[str, list[Any], list[Any]]] = [
    # (field, the ends of what is taken, what lies just outside)
    ("temperature", [0, 2], [-0.001, 2.001]),
    ("top_p", [0.001, 1], [0, -0.001, 1.001]),
    ("top_k", [-1, LARGEST], [-2, LARGEST + 1]),
    ("min_p", [0, 1], [-0.001, 1.001]),
    ("repetition_penalty", [0.001, 10], [0, -1, 10.001]),
    ("presence_penalty", [-2, 2], [-2.001, 2.001]),
    ("frequency_penalty", [-2, 2], [-2.001, 2.001]),
    ("n", [1, 128], [0, 129]),
    ("seed", [-(2**63), 2**63 - 1], [-(2**63) - 1, 2**63]),
    ("max_tokens", [1, LARGEST], [0, LARGEST + 1]),
    ("max_completion_tokens", [1, LARGEST], [0, LARGEST + 1]),
    ("min_tokens", [0, 61], [-1, LARGEST + 1]),
    ("stop", ["x" * 256, ["x"] * 16], ["x" * 257, ["x"] * 17, ""]),
    ("stop_token_ids", [[0], [255], [*range(63)]], [[-1], [257], [*range(64)]]),
    ("logit_bias", [{"0": -100}, {"255": 100}], [{"0": -100.1}, {"255": 100.1}, {"257": 1}, {"-1": 1}]),
]


@pytest.mark.parametrize(("field", "taken", "refused"), RANGES, ids=[field for field, _, _ in RANGES])
async def test_every_range_is_taken_to_its_ends_and_refused_beyond(
    tmp_path: Path, field: str, taken: list[Any], refused: list[Any]
) -> None:
    here = Harness(tmp_path, features=FEATURES)
    for value in taken:
        sent = len(here.core.sent)
        call = here.call(body=chat(**{field: value}))
        await settle(30)
        assert len(here.core.sent) > sent, (value, call.task)
        call.leave()
        await settle()
    sent = len(here.core.sent)
    for value in refused:
        call = here.call(body=chat(**{field: value}))
        await done(call)
        assert (call.status, call.error["param"]) == (400, field), value
        assert f"'{field}'" in call.error["message"]
    assert len(here.core.sent) == sent


@pytest.mark.parametrize("top", [-1, 21])
async def test_so_are_log_probabilities_on_both_surfaces(tmp_path: Path, top: int) -> None:
    here = Harness(tmp_path, features=FEATURES)
    on_chat = here.call(body=chat(logprobs=True, top_logprobs=top))
    on_completions = here.call("/v1/completions", completion(logprobs=top))
    await done(on_chat, on_completions)
    assert (on_chat.status, on_chat.error["param"]) == (400, "top_logprobs")
    assert (on_completions.status, on_completions.error["param"]) == (400, "logprobs")
    assert here.core.sent == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"min_p": 0.1}, "min_p"),
        ({"presence_penalty": 1}, "presence_penalty"),
        ({"frequency_penalty": 1}, "frequency_penalty"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"logprobs": True}, "logprobs"),
        ({"min_tokens": 2}, "min_tokens"),
        ({"response_format": FORMAT}, "response_format"),
        ({"tools": [WEATHER], "tool_choice": "required"}, "tool_choice"),
    ],
)
async def test_what_the_core_does_not_do_is_refused_and_never_ignored(
    tmp_path: Path, fields: dict[str, Any], param: str
) -> None:
    here = Harness(tmp_path, tokenizer=ToolTokenizer())
    call = here.call(body=chat(**fields))
    await done(call)
    assert (call.status, call.error["code"], call.error["param"]) == (400, "unsupported_parameter", param)


async def test_a_model_without_tools_in_its_template_says_so(tmp_path: Path) -> None:
    here = Harness(tmp_path, features=FEATURES)
    asked = here.call(body=chat(tools=[WEATHER]))
    told = here.call(body=chat(messages=[{"role": "tool", "tool_call_id": "1", "content": "x"}]))
    await done(asked, told)
    for call, param in ((asked, "tools"), (told, "messages")):
        assert (call.status, call.error["code"], call.error["param"]) == (400, "unsupported_parameter", param)
        assert "chat template has no tools" in call.error["message"]
