"""What can't be had is refused with field, value and range; what the core does not do is never ignored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_harness import FEATURES, WEATHER, Harness, ToolTokenizer, chat, done

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
