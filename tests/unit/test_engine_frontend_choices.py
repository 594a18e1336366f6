"""Several answers to one request, log probabilities, formats and tool calls: in OpenAI's shapes, streamed and whole."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import pytest
from engine_harness import FEATURES, WEATHER, Call, Harness, ToolTokenizer, chat, completion, done, settle
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from backend_engine.core.messages import Mask, Output, Submit, TokenLogprobs
from backend_engine.text.byte_tokenizer import EOS


def harness(tmp_path: Path, **options: Any) -> Harness:
    return Harness(tmp_path, features=FEATURES, **options)


def play(harness: Harness, submit: Submit, text: bytes, *, is_first: bool = True, reason: str | None = None) -> None:
    """One step of one choice."""
    tokens = [*text, EOS] if reason == "stop" else list(text)
    output = harness.core.output(submit, tokens, is_first=is_first)
    if submit.sampling.logprobs is not None:
        found = [TokenLogprobs(-0.25, (token, EOS), (-0.25, -2.5)) for token in tokens]
        output = msgspec.structs.replace(output, logprobs=found)
    finished = harness.core.finished(reason, len(tokens)) if reason is not None else None
    harness.core.say(msgspec.structs.replace(output, finished=finished))


def contents(call: Call) -> dict[int, str]:
    """Each choice's streamed text."""
    found: dict[int, str] = defaultdict(str)
    for event in call.events:
        for choice in () if event == "[DONE]" else event["choices"]:
            found[choice["index"]] += choice.get("text") or choice.get("delta", {}).get("content") or ""
    return found


# -- n -----------------------------------------------------------------------------------------------------------------


async def test_each_of_n_answers_is_a_request_of_the_core_with_a_seed_of_its_own(tmp_path: Path) -> None:
    here = harness(tmp_path)
    call = here.call(body=chat(n=3, seed=7, temperature=1))
    await here.submitted(call, 2)
    submits = here.core.submits
    assert [submit.sampling.seed for submit in submits] == [7, 8, 9]
    assert {tuple(submit.prompt) for submit in submits} == {tuple(b"user: hi\nassistant: ")}
    assert len({submit.request_id for submit in submits}) == 3
    for at, submit in reversed([*enumerate(submits)]):
        play(here, submit, b"abc"[at : at + 1], reason="stop" if at else "length")
    await done(call)
    answer = ChatCompletion.model_validate(call.json, strict=True)
    found = [(choice.index, choice.message.content, choice.finish_reason) for choice in answer.choices]
    assert found == [(0, "a", "length"), (1, "b", "stop"), (2, "c", "stop")]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(submits[0].prompt), 1 + 2 + 2)
    assert call.json["timings"]["predicted_n"] == 5


@pytest.mark.parametrize("surface", ["chat", "completions"])
async def test_n_answers_are_streamed_with_their_index_and_one_end(tmp_path: Path, surface: str) -> None:
    here = harness(tmp_path)
    options = {"n": 2, "stream": True, "stream_options": {"include_usage": True}}
    path = "/v1/chat/completions" if surface == "chat" else "/v1/completions"
    call = here.call(path, chat(**options) if surface == "chat" else completion(**options))
    await here.submitted(call, 1)
    first, second = here.core.submits
    play(here, second, b"x")
    play(here, first, b"a")
    await settle()
    play(here, second, b"y", is_first=False, reason="length")
    await settle()
    play(here, first, b"b", is_first=False)
    await settle()
    play(here, first, b"c", is_first=False, reason="length")
    await done(call)
    assert contents(call) == {0: "abc", 1: "xy"}
    *events, usage, end = call.events
    assert end == "[DONE]"
    reasons = [(event["choices"][0]["index"], event["choices"][0]["finish_reason"]) for event in events]
    assert reasons == [(1, None), (0, None), (1, "length"), (0, None), (0, "length")]
    assert ["timings" in event for event in events] == [True, False, False, False, True]
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 2)
    if surface == "chat":
        chunks = [ChatCompletionChunk.model_validate(event, strict=True) for event in call.events[:-1]]
        assert [chunk.choices[0].delta.role for chunk in chunks[:-1]] == ["assistant", "assistant", None, None, None]


async def test_when_one_answer_fails_the_others_are_aborted_and_the_client_is_told(tmp_path: Path) -> None:
    here = harness(tmp_path)
    call = here.call(body=chat(n=3))
    await here.submitted(call, 2)
    play(here, here.core.submits[0], b"a", reason="length")
    failed = here.core.finished("error", 0, error="no memory", error_code="engine_out_of_memory")
    here.core.last_word(here.core.submits[1], failed)
    await done(call)
    assert (call.status, call.error["code"]) == (503, "engine_out_of_memory")
    assert [abort.request_id for abort in here.core.aborts] == [here.core.submits[2].request_id]
    here.core.last_word(here.core.submits[2], here.core.finished("abort", 4))
    assert here.metric("request_success_total", finished_reason="error") == 1


async def test_a_client_that_leaves_n_answers_frees_them_all(tmp_path: Path) -> None:
    here = harness(tmp_path)
    call = here.call(body=chat(n=2, stream=True), headers={"traceparent": f"00-{'1' * 32}-{'2' * 16}-01"})
    await here.submitted(call, 1)
    play(here, here.core.submits[0], b"a")
    await settle()
    call.leave()
    await done(call)
    assert len(here.core.aborts) == 2
    for submit, wasted in zip(here.core.submits, (3, 4), strict=True):
        here.core.last_word(submit, here.core.finished("abort", 5, wasted_tokens=wasted))
    assert (here.spans()["llm_request"].attributes or {})["tokenline.wasted_tokens"] == 7


async def test_each_of_n_counts_against_the_limit(tmp_path: Path) -> None:
    from settings.schema import ServerSettings

    here = harness(tmp_path, server=ServerSettings(max_concurrent_requests=3))
    fits, too_many = here.call(body=chat(n=2)), here.call(body=chat(n=2))
    await done(too_many)
    assert (too_many.status, too_many.error["code"]) == (429, "queue_full")
    assert len(here.core.submits) == 2
    fits.leave()


# -- log probabilities -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_logprobs_are_openais(tmp_path: Path, stream: bool) -> None:
    here = harness(tmp_path)
    call = here.call(body=chat(logprobs=True, top_logprobs=2, stream=stream))
    submit = await here.submitted(call)
    assert submit.sampling.logprobs == 2
    play(here, submit, "é".encode()[:1])
    play(here, submit, "é".encode()[1:] + b"!", is_first=False, reason="stop")
    await done(call)
    if stream:
        chunks = [ChatCompletionChunk.model_validate(event, strict=True) for event in call.events[:-1]]
        choices: list[Any] = [chunk.choices[0] for chunk in chunks]
        assert "".join(choice.delta.content or "" for choice in choices) == "é!"
    else:
        choices = list(ChatCompletion.model_validate(call.json, strict=True).choices)
    content = [token for choice in choices if choice.logprobs for token in choice.logprobs.content]
    assert [token.bytes for token in content] == [[0xC3], [0xA9], [0x21]]
    assert [(top.token, top.logprob) for top in content[2].top_logprobs] == [("!", -0.25), ("<eos>", -2.5)]


@pytest.mark.parametrize("stream", [False, True])
async def test_completion_logprobs_are_openais(tmp_path: Path, stream: bool) -> None:
    here = harness(tmp_path)
    call = here.call("/v1/completions", completion(logprobs=1, stream=stream))
    submit = await here.submitted(call)
    play(here, submit, b"ab")
    play(here, submit, b"c", is_first=False, reason="length")
    await done(call)
    events = call.events[:-1] if stream else [call.json]
    Completion.model_validate(events[-1], strict=True)
    found = [event["choices"][0]["logprobs"] for event in events]
    assert [token for one in found for token in one["tokens"]] == ["a", "b", "c"]
    assert [offset for one in found for offset in one["text_offset"]] == [0, 1, 2]
    assert [value for one in found for value in one["token_logprobs"]] == [-0.25] * 3
    assert found[0]["top_logprobs"][0] == {"a": -0.25, "<eos>": -2.5}


# -- formats -----------------------------------------------------------------------------------------------------------


async def test_an_answer_with_a_schema_gets_a_mask_for_every_output(tmp_path: Path) -> None:
    here = harness(tmp_path)
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}
    call = here.call(body=chat(response_format=schema))
    submit = await here.submitted(call)
    assert submit.sampling.is_masked
    play(here, submit, b"4")
    play(here, submit, b"2", is_first=False)
    play(here, submit, b"", is_first=False, reason="stop")
    await done(call)
    masks = [message for message in here.core.sent if isinstance(message, Mask)]
    assert [(mask.request_id, mask.output) for mask in masks] == [(submit.request_id, at) for at in range(3)]
    assert here.core.sent.index(submit) < here.core.sent.index(masks[0])
    first = {token for token in range(257) if masks[0].allowed[token // 8] >> token % 8 & 1}
    assert first == {*b"-0123456789"}
    assert call.json["choices"][0]["message"]["content"] == "42"


async def test_a_core_that_breaks_the_mask_is_found_out(tmp_path: Path) -> None:
    here = harness(tmp_path)
    call = here.call(body=chat(response_format={"type": "json_object"}))
    submit = await here.submitted(call)
    play(here, submit, b"x")
    await done(call)
    assert (call.status, call.error["code"]) == (500, "engine_error")
    assert [abort.request_id for abort in here.core.aborts] == [submit.request_id]


# -- tools -------------------------------------------------------------------------------------------------------------

CALL = b'<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_call_is_openais(tmp_path: Path, stream: bool) -> None:
    here = harness(tmp_path, tokenizer=ToolTokenizer())
    call = here.call(body=chat(tools=[WEATHER], stream=stream))
    submit = await here.submitted(call)
    assert bytes(submit.prompt) == b"['weather'][][]"
    text = b"I look. " + CALL + b"\n" + CALL
    for at in range(len(text)):
        play(here, submit, text[at : at + 1], is_first=at == 0)
        await settle(2)
    play(here, submit, b"", is_first=False, reason="stop")
    await done(call)
    if stream:
        chunks = [ChatCompletionChunk.model_validate(event, strict=True) for event in call.events[:-1]]
        deltas = [chunk.choices[0].delta for chunk in chunks]
        assert "".join(delta.content or "" for delta in deltas) == "I look. "
        streamed = [one for delta in deltas for one in delta.tool_calls or ()]
        assert [one.index for one in streamed] == [0, 1]
        calls: list[Any] = list(streamed)
        reason = chunks[-1].choices[0].finish_reason
    else:
        choice = ChatCompletion.model_validate(call.json, strict=True).choices[0]
        assert choice.message.content == "I look. "
        calls, reason = list(choice.message.tool_calls or ()), choice.finish_reason
    assert [(one.function.name, one.function.arguments) for one in calls] == [("weather", '{"city": "Bonn"}')] * 2
    assert [one.type for one in calls] == ["function"] * 2
    assert len({one.id for one in calls}) == 2
    assert reason == "tool_calls"


async def test_calls_and_results_go_through_the_template(tmp_path: Path) -> None:
    here = harness(tmp_path, tokenizer=ToolTokenizer())
    history = [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Bonn"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    call = here.call(body=chat(messages=history, tools=[WEATHER]))
    submit = await here.submitted(call)
    assert bytes(submit.prompt) == b"['weather'][{'city': 'Bonn'}]['rain']"
    call.leave()


async def test_a_tool_that_must_be_called_is_constrained_and_none_is_not_shown(tmp_path: Path) -> None:
    here = harness(tmp_path, tokenizer=ToolTokenizer())
    named = {"type": "function", "function": {"name": "weather"}}
    for at, (choice, is_masked) in enumerate([("required", True), (named, True), ("auto", False), ("none", False)]):
        call = here.call(body=chat(tools=[WEATHER], tool_choice=choice))
        submit = await here.submitted(call, at)
        assert submit.sampling.is_masked is is_masked
        assert bytes(submit.prompt).startswith(b"[]" if choice == "none" else b"['weather']")
        call.leave()


async def test_what_is_asked_for_reaches_the_core(tmp_path: Path) -> None:
    here = harness(tmp_path)
    asked = {
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": -1.5,
        "frequency_penalty": 0.5,
        "logit_bias": {"65": -100, "66": 2.5},
        "min_tokens": 2,
        "logprobs": 3,
    }
    call = here.call("/v1/completions", completion(**asked))
    sampling = (await here.submitted(call)).sampling
    found = {name: getattr(sampling, name) for name in asked}
    assert found == {**asked, "logit_bias": ((65, -100.0), (66, 2.5))}
    call.leave()


async def test_cached_tokens_and_preemptions_are_told(tmp_path: Path) -> None:
    here = harness(tmp_path)
    call = here.call(body=chat(), headers={"traceparent": f"00-{'1' * 32}-{'2' * 16}-01"})
    submit = await here.submitted(call)
    scheduled = msgspec.structs.replace(here.core.scheduled(), cached_tokens=16)
    output = Output(submit.request_id, [65], scheduled.prefill_end_ns, scheduled)
    here.core.say(output)
    taken_ns = here.core.output(submit, [], is_first=False).step_end_ns
    finished = here.core.finished("length", 1, preemptions=1, preempted_ns=5_000_000, preempted_at_ns=(taken_ns,))
    here.core.last_word(submit, finished)
    await done(call)
    assert call.json["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}
    timings = call.json["timings"]
    assert (timings["cache_n"], timings["preemptions"], timings["preempted_ms"]) == (16, 1, 5.0)
    (event,) = here.spans()["llm_request"].events
    assert (event.name, dict(event.attributes or {})) == ("preempted", {})
    assert event.timestamp - (here.spans()["llm_request"].start_time or 0) == taken_ns - timings["marks"]["received"]
