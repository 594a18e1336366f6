"""Requests of several kinds at once, for engines whose [token_interval] switches differ: the same must come of them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

NAMES = ("async_scheduling", "overlap_token_interval", "detokenizer_async", "slot_reuse")
LEAVERS = 2


def switches_of(combination: str) -> dict[str, bool]:
    """Of four digits, 1 for on."""
    return dict(zip(NAMES, (digit == "1" for digit in combination), strict=True))


def chat(text: str, **fields: Any) -> dict[str, Any]:
    asked = {"model": "simulated", "messages": [{"role": "user", "content": text}], "temperature": 0}
    return asked | {"stream": True} | fields


async def events_of(client: httpx.AsyncClient, body: dict[str, Any]) -> list[dict[str, Any]]:
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200
        return [json.loads(line[6:]) async for line in answer.aiter_lines() if line.startswith("data: {")]


async def leave_early(client: httpx.AsyncClient, body: dict[str, Any]) -> httpx.Headers:
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        async for _ in answer.aiter_lines():
            break
        return answer.headers


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events)


async def use(client: httpx.AsyncClient, forward_ms: float) -> tuple[list[str], list[httpx.Headers]]:
    """More requests than there are slots (4), one with a stop string, some that leave. Gives the texts, and the
    headers that those who left had got."""
    whole = text_of(await events_of(client, chat("a stop string", max_tokens=30)))
    stop = whole[11:14]
    asked = [
        *(chat(f"question {number}", max_tokens=12 + number) for number in range(5)),
        chat("a stop string", max_tokens=30, stop=stop),
    ]
    leavers = [leave_early(client, chat(f"leaver {number}", max_tokens=5000)) for number in range(LEAVERS)]
    *answers, first, second = await asyncio.gather(*(events_of(client, body) for body in asked), *leavers)
    for number, events in enumerate(answers[:5]):
        check_times(events, 12 + number, forward_ms)
    assert text_of(answers[5]) == whole[: whole.index(stop)]
    return [text_of(events) for events in answers], [first, second]


def check_times(events: list[dict[str, Any]], tokens: int, forward_ms: float) -> None:
    timings = events[-1]["timings"]
    marks = timings["marks"]
    assert timings["predicted_n"] == tokens
    assert timings["steps"] == tokens - 1
    order = [marks[name] for name in ("queued", "scheduled", "prefill_end", "last_token")]
    assert order == sorted(order)
    spent_ms = timings["queue_ms"] + timings["prompt_ms"] + timings["predicted_ms"]
    assert spent_ms == pytest.approx((marks["last_token"] - marks["queued"]) / 1e6)
    assert timings["predicted_ms"] == pytest.approx((tokens - 1) * forward_ms + timings["token_gap_ms"], rel=0.2)
    assert timings["predicted_ms"] >= (tokens - 1) * forward_ms
