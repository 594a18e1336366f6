"""5,000 requests through the whole line, of which 30 % leave at random times: nothing is left behind, nothing grows."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from pathlib import Path

import aiohttp
import pytest
from closing_rig import mixed
from line_rig import Line, line

pytestmark = pytest.mark.e2e

REQUESTS, AT_ONCE = 5000, 48
SHARE_THAT_LEAVES = 0.3
LATEST_S = 0.3
LONG = 2000
"""Tokens of an answer that nobody waits for to its end."""
MIB = 2**20
AT_REST = (
    "tokenline_engine_num_requests_running",
    "tokenline_engine_num_requests_waiting",
    "tokenline_engine_kv_cache_usage_ratio",
    "tokenline_inflight_requests",
    "tokenline_queue_depth",
)


async def ask(session: aiohttp.ClientSession, up: Line, number: int, chance: random.Random) -> str:
    path, body = mixed(number, up.model, stream=chance.random() < 0.7)
    leaves_after_s = None
    if chance.random() < SHARE_THAT_LEAVES:
        leaves_after_s = chance.uniform(0, LATEST_S)
        body["max_tokens"] = LONG
    try:
        async with asyncio.timeout(leaves_after_s), session.post(path, json=body) as answer:
            data = await answer.read()
    except TimeoutError:
        return "left"
    assert answer.status == 200, data
    return "ended"


async def ask_all(up: Line, numbers: range) -> Counter[str]:
    room, chance = asyncio.Semaphore(AT_ONCE), random.Random(numbers.start)
    async with aiohttp.ClientSession(up.origin, headers={"authorization": f"Bearer {up.key}"}) as session:

        async def one(number: int) -> str:
            async with room:
                return await ask(session, up, number, chance)

        return Counter(await asyncio.gather(*map(one, numbers)))


def until_at_rest(up: Line) -> None:
    deadline = time.monotonic() + 10
    while any(up.metric(name) for name in AT_REST):
        assert time.monotonic() < deadline, {name: up.metric(name) for name in AT_REST}
        time.sleep(0.05)


def memory_of(up: Line) -> int:
    return sum(process.memory_info().rss for process in up.processes())


async def test_nothing_is_left_of_5000_requests_of_which_30_percent_leave(tmp_path: Path) -> None:
    variables = {
        "TOKENLINE_SIMULATED__FORWARD_MS": "2",
        "TOKENLINE_SCHEDULER__MAX_NUM_SEQS": "16",
    }
    with line(tmp_path, "--device", "simulated", **variables) as up:
        ends = await ask_all(up, range(1000))
        until_at_rest(up)
        early = memory_of(up)
        ends += await ask_all(up, range(1000, REQUESTS))
        until_at_rest(up)
        assert memory_of(up) - early < 80 * MIB
        assert ends.total() == REQUESTS
        assert ends["left"] == pytest.approx(SHARE_THAT_LEAVES * REQUESTS, rel=0.1)
        # one end each is on the page of those that the gateway saw (who left within a millisecond was never here), and
        # aborts took effect in the engine
        seen = up.metric("tokenline_requests_total")
        assert ends["ended"] + 0.8 * ends["left"] < seen <= REQUESTS
        assert up.metric("tokenline_requests_total", outcome="ok") == ends["ended"]
        assert up.metric("tokenline_requests_total", outcome="client_cancelled") == seen - ends["ended"]
        assert up.metric("tokenline_engine_request_success_total", finished_reason="abort") > 0.3 * ends["left"]
        assert up.metric("tokenline_timing_anomalies_total") == 0
