"""Answers: OpenAI's shapes, one event a step, timings in band, text that is whole and stops where it should."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from engine_harness import HOST, Call, Harness, chat, completion, done, settle
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from backend_engine.core.messages import Submit
from backend_engine.text.byte_tokenizer import EOS


async def answered(
    harness: Harness, call: Call, steps: list[bytes], reason: str = "length", end: int | None = None
) -> None:
    """Plays the core: one step for each entry; `end` is a stop token after the last."""
    submit = await harness.submitted(call)
    count = sum(map(len, steps)) + (end is not None)
    for at, text in enumerate(steps):
        is_last = at == len(steps) - 1
        tokens = [*text, end] if is_last and end is not None else list(text)
        output = harness.core.output(submit, tokens, is_first=at == 0)
        finished = harness.core.finished(reason, count) if is_last else None
        harness.core.say(msgspec.structs.replace(output, finished=finished))
        await settle()
    await done(call)


def texts(call: Call) -> list[str]:
    """The text of each event that has a choice."""
    choices = [event["choices"][0] for event in call.events if event != "[DONE]" and event["choices"]]
    return [choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices]


async def test_a_chat_stream_is_openais_and_has_one_event_a_step(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    call = harness.call(body=chat(stream=True, max_tokens=3))
    await answered(harness, call, [b"a", b"b", b"c"])
    assert call.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert (call.headers["cache-control"], call.headers["x-accel-buffering"]) == ("no-cache", "no")
    *events, end = call.events
    assert end == "[DONE]"
    chunks = [ChatCompletionChunk.model_validate(event, strict=True) for event in events]
    assert [chunk.choices[0].delta.content for chunk in chunks] == ["a", "b", "c"]
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant", None, None]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, "length"]
    assert {chunk.id for chunk in chunks} == {events[0]["id"]}
    assert chunks[0].id.startswith("chatcmpl-")
    assert {(chunk.model, chunk.created) for chunk in chunks} == {("simulated", 1_800_000_000)}
    assert all("usage" not in event for event in events)
    assert len(call.chunks) == 3
    assert all(chunk.endswith(b"\n\n") for chunk in call.chunks)


async def test_usage_comes_once_in_a_chunk_of_its_own_for_those_who_ask(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    call = harness.call(body=chat(stream=True, stream_options={"include_usage": True}))
    await answered(harness, call, [b"a", b"b"], "stop", end=EOS)
    *events, usage, end = call.events
    assert end == "[DONE]"
    assert [event["usage"] for event in events] == [None, None]
    chunk = ChatCompletionChunk.model_validate(usage, strict=True)
    assert chunk.choices == []
    assert chunk.usage is not None
    counted = (chunk.usage.prompt_tokens, chunk.usage.completion_tokens, chunk.usage.total_tokens)
    assert counted == (len(b"user: hi\nassistant: "), 3, len(b"user: hi\nassistant: ") + 3)
    assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


async def test_a_whole_chat_answer_is_openais(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    call = harness.call(body=chat())
    await answered(harness, call, [b"he", b"llo"], "stop", end=EOS)
    answer = ChatCompletion.model_validate(call.json, strict=True)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("hello", "stop")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6
    assert call.headers["content-type"] == "application/json"
    assert call.json["timings"]["predicted_n"] == 6


@pytest.mark.parametrize("stream", [False, True])
async def test_completions_are_openais(tmp_path: Path, stream: bool) -> None:
    harness = Harness(tmp_path)
    call = harness.call("/v1/completions", completion(stream=stream, max_tokens=3))
    await answered(harness, call, [b"a", b"b", b"c"])
    if stream:
        assert texts(call) == ["a", "b", "c"]
        assert [event["choices"][0]["finish_reason"] for event in call.events[:-1]] == [None, None, "length"]
        Completion.model_validate(call.events[2], strict=True)  # the type wants a finish_reason, unlike the API
    else:
        answer = Completion.model_validate(call.json, strict=True)
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("abc", "length")
    assert call.body.count(b'"object":"text_completion"') == (3 if stream else 1)


@pytest.mark.parametrize("end", [EOS, ord("!")])
async def test_a_stop_token_is_no_text_but_counts(tmp_path: Path, end: int) -> None:
    harness = Harness(tmp_path)
    call = harness.call(body=chat(stream=True, stop_token_ids=[ord("!")]))
    await answered(harness, call, [b"a", b""], "stop", end=end)
    assert texts(call) == ["a", ""]
    assert call.events[1]["choices"][0]["delta"] == {}
    assert call.events[1]["timings"]["predicted_n"] == 2


async def test_a_character_over_three_steps_comes_in_one_event(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    call = harness.call(body=chat(stream=True, max_tokens=6))
    data = "é漢!".encode()
    await answered(harness, call, [data[at : at + 1] for at in range(6)])
    assert texts(call) == ["é", "漢", "!"]
    assert call.events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert "timings" in call.events[0]


async def test_the_engines_timings_come_on_the_first_event_and_complete_on_the_last(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    call = harness.call(body=chat(stream=True, max_tokens=4))
    await answered(harness, call, [b"a", b"b", b"c", b"d"])
    first, *middle, last = [event.get("timings") for event in call.events[:-1]]
    assert middle == [None, None]
    prompt = len(b"user: hi\nassistant: ")
    assert (first["cache_n"], first["prompt_n"], first["prompt_ms"]) == (0, prompt, 20)
    assert (first["tokenize_ms"], first["queue_ms"], first["prefill_chunks"]) == (0, 5, 1)
    assert first["prompt_per_second"] == pytest.approx(prompt / 0.020)
    assert first["engine"] == {"running": 3, "waiting": 2, "kv_usage": 0.25, "batch": 4}
    assert first["host"] == {"host_id": HOST.host_id, "boot_id": HOST.boot_id, "time_namespace": ""}
    assert first["simulated"] is True
    assert "predicted_ms" not in first
    assert (last["predicted_n"], last["predicted_ms"], last["predicted_per_token_ms"]) == (4, 60, 20)
    assert (last["steps"], last["mean_batch"], last["token_gap_ms"]) == (3, 4, 1.5)
    assert {name: last[name] for name in first if name != "marks"} == {n: first[n] for n in first if n != "marks"}
    marks = last["marks"]
    assert {name: marks[name] for name in first["marks"]} == first["marks"]
    order = [marks[name] for name in ("received", "queued", "scheduled", "prefill_end", "first_written", "last_token")]
    assert order == sorted(order)
    milliseconds = [first["queue_ms"], first["prompt_ms"], last["predicted_ms"]]
    assert sum(milliseconds) * 1e6 == marks["last_token"] - marks["queued"]


async def test_first_written_is_stamped_once_at_the_first_text(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    call = harness.call(body=chat(stream=True, max_tokens=2))
    submit = await harness.submitted(call)
    harness.core.first(submit, "é".encode()[:1])
    await settle()
    assert call.messages == []
    harness.core.more(submit, "é".encode()[1:], step_ms=30)
    await settle()
    written = harness.clock.mono_ns()
    harness.core.more(submit, b"x", "length", 3)
    await done(call)
    assert [event["timings"]["marks"]["first_written"] for event in call.events[:-1]] == [written, written]


@pytest.mark.parametrize("text", [b"a", b""])
async def test_an_answer_of_one_step_has_one_timings_object(tmp_path: Path, text: bytes) -> None:
    harness = Harness(tmp_path)
    call = harness.call(body=chat(stream=True))
    await answered(harness, call, [text], "stop", end=EOS)
    event, end = call.events
    assert end == "[DONE]"
    assert event["choices"][0]["delta"] == {"role": "assistant", "content": text.decode()}
    assert event["timings"]["marks"]["first_written"] == harness.clock.mono_ns()
    assert event["timings"]["marks"]["last_token"] <= harness.clock.mono_ns()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_the_answer_and_tells_the_core(tmp_path: Path, stream: bool) -> None:
    harness = Harness(tmp_path)
    call = harness.call(body=chat(stream=stream, stop=["END", "zz"]))
    submit = await harness.submitted(call)
    harness.core.first(submit, b"on")
    for step in (b"e E", b"N", b"Dxx"):
        assert harness.core.aborts == []
        harness.core.more(submit, step)
        await settle()
    await done(call)
    assert [abort.request_id for abort in harness.core.aborts] == [submit.request_id]
    if stream:
        assert texts(call) == ["on", "e ", ""]
        last = call.events[-2]
        assert last["choices"][0]["finish_reason"] == "stop"
        assert last["timings"]["predicted_n"] == 9
        assert b"E" not in b"".join(text.encode() for text in texts(call))
    else:
        assert call.json["choices"][0]["message"]["content"] == "one "
        assert call.json["usage"]["completion_tokens"] == 9
    harness.core.more(submit, b"y")
    harness.core.last_word(submit, harness.core.finished("abort", 10, wasted_tokens=1))
    assert len(harness.core.aborts) == 1
    assert harness.metric("request_success_total", finished_reason="stop") == 1
    assert harness.metric("request_success_total", finished_reason="abort") is None


async def test_held_back_text_comes_with_the_end_when_no_stop_string_came(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    call = harness.call(body=chat(stream=True, stop="END", max_tokens=3))
    await answered(harness, call, [b"a", b"E", b"N"])
    assert texts(call) == ["a", "EN"]


async def test_steps_that_piled_up_are_still_an_event_each(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    call = harness.call(body=chat(stream=True, max_tokens=3))
    submit = await harness.submitted(call)
    harness.core.first(submit, b"a")
    harness.core.more(submit, b"b")
    harness.core.more(submit, b"c", "length", 3)
    await done(call)
    assert texts(call) == ["a", "b", "c"]
    assert "timings" in call.events[0]


def failed(harness: Harness, submit: Submit, code: str) -> None:
    finished = harness.core.finished("error", 0, error="it broke", error_code=code)
    harness.core.last_word(submit, finished)


@pytest.mark.parametrize(
    ("code", "status"),
    [("engine_error", 500), ("engine_out_of_memory", 503), ("queue_full", 429), ("context_length_exceeded", 400)],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_fails_before_the_first_event_is_an_http_error(
    tmp_path: Path, stream: bool, code: str, status: int
) -> None:
    harness = Harness(tmp_path)
    call = harness.call(body=chat(stream=stream))
    failed(harness, await harness.submitted(call), code)
    await done(call)
    assert (call.status, call.error["code"], call.error["message"]) == (status, code, "it broke")


async def test_what_fails_in_a_stream_is_one_error_event_and_the_end(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    call = harness.call(body=chat(stream=True))
    submit = await harness.submitted(call)
    harness.core.first(submit, b"a")
    await settle()
    failed(harness, submit, "engine_out_of_memory")
    await done(call)
    token, error = call.events
    assert call.status == 200
    assert token["choices"][0]["delta"]["content"] == "a"
    assert (error["error"]["code"], error["error"]["type"]) == ("engine_out_of_memory", "api_error")
    assert call.is_ended


async def test_when_the_core_dies_everybody_is_told(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    streaming, waiting, whole = (harness.call(body=chat(stream=stream)) for stream in (True, True, False))
    await settle()
    harness.core.first(harness.core.submits[0], b"a")
    await settle()
    harness.frontend.lose_core("it was killed")
    await done(streaming, waiting, whole)
    assert streaming.events[-1]["error"]["code"] == "engine_unavailable"
    for call in (waiting, whole):
        assert (call.status, call.error["code"], call.headers["retry-after"]) == (503, "engine_unavailable", "2")
        assert "killed" not in call.error["message"]
    late = harness.call(body=chat())
    health = harness.call("/health", method="GET")
    await done(late, health)
    assert (late.status, health.status, health.json["status"]) == (503, 503, "failed")
    assert harness.metric("request_success_total", finished_reason="error") == 3


async def test_answers_do_not_mix(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    calls = [harness.call(body=chat(stream=True, max_tokens=2)) for _ in range(3)]
    await settle()
    for letter, submit in zip(b"abc", harness.core.submits, strict=True):
        harness.core.first(submit, bytes([letter]))
    for letter, submit in zip(b"xyz", harness.core.submits, strict=True):
        harness.core.more(submit, bytes([letter]), "length", 2)
    await done(*calls)
    assert [texts(call) for call in calls] == [["a", "x"], ["b", "y"], ["c", "z"]]


async def test_a_long_prompt_is_tokenised_beside_the_event_loop(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    call = harness.call("/v1/completions", completion(prompt="x" * 9000))
    await done(call)
    assert call.error["code"] == "context_length_exceeded"
    assert "9000 tokens" in call.error["message"]


class Broken:
    """A tokenizer with a bug."""

    def __getattr__(self, name: str) -> Any:
        raise ZeroDivisionError("secret detail")


async def test_a_bug_is_a_500_without_details(tmp_path: Path) -> None:
    harness = Harness(tmp_path, tokenizer=Broken())
    call = harness.call(body=chat())
    await done(call)
    assert (call.status, call.error["code"]) == (500, "internal_error")
    assert b"secret" not in call.body
