"""What a load test samples beside the requests: the engine's page and this machine's GPUs."""

from __future__ import annotations

import asyncio

import pytest

from loadtest.driver import Progress
from loadtest.monitor import Monitor
from loadtest.page import figures_of, gpu_figures
from tracing.clock import SystemClock


def test_an_engines_page_is_read_under_any_of_its_names():
    page = (
        '# TYPE tokenline_engine_busy_ratio gauge\ntokenline_engine_busy_ratio{model="m"} 0.5\n'
        'tokenline_engine_num_requests_running{model="a"} 2\ntokenline_engine_num_requests_running{model="b"} 3\n'
        'vllm:num_requests_waiting{model="a"} 7\nother 1\n'
    )
    assert figures_of(page) == {"busy": 0.5, "running": 5.0, "waiting": 7.0}
    assert figures_of("<html>") == {}
    assert figures_of("tokenline_engine_busy_ratio nonsense\n") == {}


def test_gpus_of_this_machine_are_read_beside_the_page_and_unknown_ones_are_absent():
    two = [
        {"utilization_ratio": 0.5, "memory_used_bytes": 3, "memory_busy_ratio": 0.2, "dram_bandwidth_ratio": None},
        {"utilization_ratio": 1.0, "memory_used_bytes": 4, "memory_busy_ratio": 0.9, "dram_bandwidth_ratio": 0.4},
    ]
    assert gpu_figures(two) == {
        "gpu_utilization": 0.75,
        "gpu_memory_bytes": 7.0,
        "gpu_bandwidth": pytest.approx(0.3),
    }
    assert gpu_figures([{"utilization_ratio": None}]) == {}


async def test_a_monitor_samples_gpus_at_its_own_interval():
    monitor = Monitor(Progress(), SystemClock(), 10, None, lambda: {"gpu_utilization": 0.7})
    watching = asyncio.create_task(monitor.run())
    async with asyncio.timeout(10):
        while len(monitor.samples) < 3:
            await asyncio.sleep(0.005)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert {sample["gpu_utilization"] for sample in monitor.samples} == {0.7}
