"""The four [token_interval] switches, in combinations that hold every pair of their values: the same to the outside.

All sixteen, through the whole line: tests/e2e/test_every_switch.py."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import psutil
from engine_rig import EngineProcess, engine_settings, running, until
from switches_rig import switches_of, use

from settings.schema import SchedulerSettings, TokenIntervalSettings

COMBINATIONS = ("0000", "0111", "1011", "1101", "1110")
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_ratio")
FORWARD_MS = 5.0


async def texts_of(engine: EngineProcess) -> list[str]:
    async with engine.async_client() as client:
        texts, _ = await use(client, FORWARD_MS)
    return texts


def test_every_combination_serves_alike_and_leaves_nothing_behind(tmp_path: Path) -> None:
    texts: dict[str, list[str]] = {}
    for combination in COMBINATIONS:
        switches = switches_of(combination)
        folder = tmp_path / combination
        folder.mkdir()
        settings = engine_settings(
            folder,
            forward_ms=FORWARD_MS,
            scheduler=SchedulerSettings(max_num_seqs=4, max_num_batched_tokens=64),
            token_interval=TokenIntervalSettings(**switches),
        )
        with running(settings, env=dict(os.environ)) as engine:
            texts[combination] = asyncio.run(texts_of(engine))
            until(lambda: all(engine.metrics()[_series(name)] == 0 for name in GAUGES), "the gauges are at rest")
            info = next(name for name in engine.metrics() if name.startswith("tokenline_engine_info"))
            for name in ("async_scheduling", "slot_reuse"):
                assert f'{name}="{str(switches[name]).lower()}"' in info
            children = [" ".join(child.cmdline()) for child in psutil.Process(engine.process.pid).children()]
            assert any("detokenize_process" in line for line in children) == switches["detokenizer_async"]
    assert len({tuple(found) for found in texts.values()}) == 1


def _series(name: str) -> str:
    return f'tokenline_engine_{name}{{model="simulated"}}'
