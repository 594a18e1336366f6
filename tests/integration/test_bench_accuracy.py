"""What the load test measures, against what the simulated engine stamped when it wrote."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest
from engine_rig import EngineProcess, engine_settings, running
from line_rig import free_ports

from loadtest.client import LoadClient
from loadtest.driver import Driver, Progress
from loadtest.figures import quantile
from loadtest.record import Record
from loadtest.session import Asked, open_bench
from loadtest.settings import bench_settings
from loadtest.stages import parse_stages
from settings.schema import ServerSettings, SimulatedSettings
from tracing.clock import SystemClock

PROMPT_TOKENS, OUTPUT_TOKENS = 96, 8
ADDED_MS = 10.0
"""What a busy machine may add at the median beyond what is claimed."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """A forward of 50 ms, a prefill that takes 200 ms more."""
    settings = engine_settings(
        tmp_path_factory.mktemp("engine"),
        server=ServerSettings(port=free_ports(1)[0], drain_seconds=1),
        simulated=SimulatedSettings(forward_ms=50, prefill_token_us=2000),
    )
    with running(settings, is_alone=True) as found:
        yield found


async def measured(engine: EngineProcess, stages: str) -> list[Record]:
    given = {
        "api": {"base_url": engine.base_url, "api_key_env": None},
        "workload": {"prompt_tokens": PROMPT_TOKENS, "max_output_tokens": OUTPUT_TOKENS, "ignore_eos": True},
    }
    settings = bench_settings(given, "test")
    clock, rng, progress = SystemClock(), random.Random(stages), Progress()
    async with open_bench(Asked(settings), rng) as session:
        assert session.lengths.startswith("exact")
        client = LoadClient(session.endpoint, session.model, settings, clock, rng)
        driver = Driver(client, parse_stages(stages, 32), session.prompts, settings.load_test, clock, progress, 60)
        async with asyncio.timeout(60):
            await driver.run()
    return driver.records


@pytest.mark.parametrize("stages", ["12:1500ms", "4rps:1500ms"])
async def test_times_are_the_engines_own_and_counts_are_exact(engine, stages):
    records = await measured(engine, stages)
    assert len(records) >= 3
    assert all(record.is_good for record in records), {r.fault for r in records}
    assert {record.output_tokens for record in records} == {OUTPUT_TOKENS}
    assert {len(record.token_events) for record in records} == {OUTPUT_TOKENS}
    assert {record.prompt_tokens for record in records} == {PROMPT_TOKENS}
    assert not [record.oddities for record in records if record.oddities]
    ttft, ttft_engine, tpot, tpot_engine = [], [], [], []
    for record in records:
        marks = record.timings.marks
        ttft.append((record.first_token_ns - record.sent_ns) / 1e6)
        ttft_engine.append((marks.first_written - record.sent_ns) / 1e6)
        tpot.append(record.tpot_ms)
        tpot_engine.append((marks.last_token - marks.prefill_end) / 1e6 / (OUTPUT_TOKENS - 1))
        assert record.scheduled_ns <= record.sent_ns <= record.first_byte_ns <= record.first_token_ns
        assert record.first_token_ns < record.last_token_ns <= record.end_ns
    assert min(ttft_engine) > 200
    assert min(tpot_engine) >= 49.9
    for client, own in ((ttft, ttft_engine), (tpot, tpot_engine)):
        p50, own_p50 = quantile(sorted(client), 0.5), quantile(sorted(own), 0.5)
        assert own_p50 <= p50 * 1.02
        assert p50 <= own_p50 * 1.02 + ADDED_MS
