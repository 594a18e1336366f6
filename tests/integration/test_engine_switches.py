"""The four [token_interval] switches, in combinations that hold every pair of their values: the same to the outside."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from engine_rig import EngineProcess, engine_settings, running, until

from settings.schema import SchedulerSettings, TokenIntervalSettings

NAMES = ("async_scheduling", "overlap_token_interval", "detokenizer_async", "slot_reuse")
COMBINATIONS = ("0000", "0111", "1011", "1101", "1110", "1111")
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_ratio")
FORWARD_MS = 5.0


def chat(text: str, **fields: Any) -> dict[str, Any]:
    asked = {"model": "simulated", "messages": [{"role": "user", "content": text}], "temperature": 0}
    return asked | {"stream": True} | fields


async def events_of(client: httpx.AsyncClient, body: dict[str, Any]) -> list[dict[str, Any]]:
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200
        return [json.loads(line[6:]) async for line in answer.aiter_lines() if line.startswith("data: {")]


async def leave_early(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        async for _ in answer.aiter_lines():
            return


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events)


async def use(engine: EngineProcess) -> list[str]:
    """Requests of several kinds at once; their texts. More than there are slots, one with a stop string, two that
    leave."""
    async with engine.async_client() as client:
        whole = text_of(await events_of(client, chat("a stop string", max_tokens=30)))
        stop = whole[11:14]
        asked = [
            *(chat(f"question {number}", max_tokens=12 + number) for number in range(5)),
            chat("a stop string", max_tokens=30, stop=stop),
        ]
        leavers = [leave_early(client, chat(f"leaver {number}", max_tokens=5000)) for number in range(2)]
        *answers, _, _ = await asyncio.gather(*(events_of(client, body) for body in asked), *leavers)
    for number, events in enumerate(answers[:5]):
        check_times(events, tokens=12 + number)
    assert text_of(answers[5]) == whole[: whole.index(stop)]
    return [text_of(events) for events in answers]


def check_times(events: list[dict[str, Any]], tokens: int) -> None:
    timings = events[-1]["timings"]
    marks = timings["marks"]
    assert timings["predicted_n"] == tokens
    assert timings["steps"] == tokens - 1
    order = [marks[name] for name in ("queued", "scheduled", "prefill_end", "last_token")]
    assert order == sorted(order)
    spent_ms = timings["queue_ms"] + timings["prompt_ms"] + timings["predicted_ms"]
    assert spent_ms == pytest.approx((marks["last_token"] - marks["queued"]) / 1e6)
    assert timings["predicted_ms"] == pytest.approx((tokens - 1) * FORWARD_MS + timings["token_gap_ms"], rel=0.2)
    assert timings["predicted_ms"] >= (tokens - 1) * FORWARD_MS


def test_every_combination_serves_alike_and_leaves_nothing_behind(tmp_path: Path) -> None:
    texts: dict[str, list[str]] = {}
    for combination in COMBINATIONS:
        switches = dict(zip(NAMES, (digit == "1" for digit in combination), strict=True))
        folder = tmp_path / combination
        folder.mkdir()
        settings = engine_settings(
            folder,
            forward_ms=FORWARD_MS,
            scheduler=SchedulerSettings(max_num_seqs=4, max_num_batched_tokens=64),
            token_interval=TokenIntervalSettings(**switches),
        )
        with running(settings, env=dict(os.environ)) as engine:
            texts[combination] = asyncio.run(use(engine))
            until(lambda: all(engine.metrics()[_series(name)] == 0 for name in GAUGES), "the gauges are at rest")
            info = next(name for name in engine.metrics() if name.startswith("tokenline_engine_info"))
            for name in ("async_scheduling", "slot_reuse"):
                assert f'{name}="{str(switches[name]).lower()}"' in info
            children = [" ".join(child.cmdline()) for child in psutil.Process(engine.process.pid).children()]
            assert any("detokenize_process" in line for line in children) == switches["detokenizer_async"]
    assert len({tuple(found) for found in texts.values()}) == 1


def _series(name: str) -> str:
    return f'tokenline_engine_{name}{{model="simulated"}}'
