"""10,000 requests to a real (tiny) model leave every process of the engine as large as it was."""

from __future__ import annotations

import asyncio
import gc
import random
import sys
from pathlib import Path

import aiohttp
import psutil
import pytest

from settings.schema import EngineSettings, SchedulerSettings

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))  # the engine's own test rigs

from engine_rig import EngineProcess, engine_settings, running
from test_engine_structured import write_tiny_model

pytestmark = pytest.mark.e2e

FIRST, REQUESTS, AT_ONCE = 20_000, 10_000, 24
"""The first are not measured: meanwhile oneDNN makes a kernel for each size of a step and each number of threads."""
MOST_GROWTH_BYTES = 6 * 2**20
"""Of each process: 0.7 kB a request would be more."""


def asked(chance: random.Random, model: str) -> dict[str, object]:
    """Greedy, sampled, penalised, biased; long and short, with a beginning that others have too or not."""
    begin = [9, 8, 7, 6] * chance.randint(0, 5)
    prompt = begin + [chance.randrange(3, 300) for _ in range(chance.randint(1, 20))]
    how = chance.choice(
        [{}, {"temperature": 1.0, "top_p": 0.9}, {"presence_penalty": 1.0}, {"logit_bias": {"5": 2}}, {"logprobs": 2}]
    )
    return {"model": model, "prompt": prompt, "max_tokens": chance.randint(1, 6), "temperature": 0} | how


async def serve(engine: EngineProcess, model: str, count: int, chance: random.Random) -> None:
    """`count` requests, some of them streamed, a few of them left."""
    connector = aiohttp.UnixConnector(str(engine.settings.engine_socket), limit=AT_ONCE)
    async with aiohttp.ClientSession(connector=connector) as session:
        room = asyncio.Semaphore(AT_ONCE)

        async def one() -> None:
            body = asked(chance, model) | {"stream": chance.random() < 0.5}
            leaves_after_s = chance.uniform(0, 0.05) if chance.random() < 0.1 else None
            async with room:
                try:
                    async with asyncio.timeout(leaves_after_s):
                        async with session.post("http://engine/v1/completions", json=body) as answer:
                            assert answer.status == 200, await answer.text()
                            await answer.read()
                except TimeoutError:
                    return

        await asyncio.gather(*(one() for _ in range(count)))


def sizes(engine: EngineProcess) -> dict[str, int]:
    """Resident bytes of each process, the frontend's and its children's."""
    frontend = psutil.Process(engine.process.pid)
    children = {next(word for word in each.cmdline() if "backend_engine" in word): each for each in frontend.children()}
    return {name: each.memory_info().rss for name, each in ({"frontend": frontend} | children).items()}


async def test_no_process_of_the_engine_grows_over_ten_thousand_requests(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_tiny_model(folder)
    settings = engine_settings(
        tmp_path / "state",
        engine=EngineSettings(model=str(folder), device="cpu", page_size=4, max_model_len=48, cpu_kv_cache_gib=0.0008),
        scheduler=SchedulerSettings(max_num_seqs=16),
    )
    chance = random.Random(11)
    with running(settings, ready_s=180) as engine:
        await serve(engine, settings.engine_model_name, FIRST, chance)
        gc.collect()
        first = sizes(engine)
        await serve(engine, settings.engine_model_name, REQUESTS, chance)
        last = sizes(engine)
    assert len(first) == 4
    assert first.keys() == last.keys(), "a process was started again"
    growth = {name: last[name] - first[name] for name in first}
    assert all(grown < MOST_GROWTH_BYTES for grown in growth.values()), growth
