"""The engine on the GPU: transformers' own greedy output, the same in every order of its loop, honest refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_support import ORDERS, TINY_MODELS, Driver, generated, prompts, settings_of, write_tiny_model

from backend_engine.devices.fitting import FitError
from backend_engine.devices.opening import open_device
from backend_engine.nvml import open_nvml
from tracing.clock import SystemClock

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
LLAMA = "llama with grouped queries"
LENGTHS = (1, 2, 5, 9, 16, 17, 33, 40)
OUTPUTS = (1, 7, 20, 13, 30, 4, 18, 25)


def driver_of(folder: Path, order: str = "pipelined", **engine: Any) -> Driver:
    settings = settings_of(
        engine={
            "model": str(folder), "device": DEVICE, "dtype": "float32", "page_size": 16,
            "gpu_memory_utilization": 0.2, **engine,
        },
        scheduler={"max_num_seqs": 5, "max_num_batched_tokens": 24},
        token_interval=ORDERS[order],
    )  # fmt: skip
    clock = SystemClock()
    return Driver(open_device(settings, clock), settings, clock)


def played(folder: Path, order: str, **sampling: Any) -> dict[str, list[int]]:
    """A mixed batch that comes bit by bit; everybody's tokens."""
    driver = driver_of(folder, order)
    for turn, (name, prompt, max_tokens) in enumerate(zip("abcdefgh", prompts(LENGTHS), OUTPUTS, strict=True)):
        driver.submit(name, prompt, max_tokens, **sampling)
        for _ in range(turn % 3):
            driver.turn()
    driver.run()
    driver.close()
    return {name: driver.tokens(name) for name in "abcdefgh"}


@pytest.mark.parametrize("kind", TINY_MODELS)
def test_greedy_output_on_the_gpu_equals_transformers_on_the_cpu(kind: str, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path, kind)
    found = played(tmp_path, "pipelined")
    for name, prompt, max_tokens in zip("abcdefgh", prompts(LENGTHS), OUTPUTS, strict=True):
        assert found[name] == generated(model, prompt, max_tokens), name


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.1, "seed": 42, "top_p": 0.95, "top_k": 40}], ids=str)
def test_every_order_of_the_loop_gives_the_same_tokens(sampling: dict[str, Any], tmp_path: Path) -> None:
    write_tiny_model(tmp_path, LLAMA)
    oracle = played(tmp_path, "in order", **sampling)
    for order in ORDERS:
        assert played(tmp_path, order, **sampling) == oracle, order


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs_to_the_end(dtype: str, tmp_path: Path) -> None:
    write_tiny_model(tmp_path, LLAMA)
    driver = driver_of(tmp_path, dtype=dtype)
    driver.submit("a", prompts([40])[0], 30)
    driver.run()
    assert len(driver.tokens("a")) == 30
    driver.close()


def test_a_share_of_memory_too_small_for_one_sequence_is_refused_with_the_numbers(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, LLAMA)
    with pytest.raises(FitError, match=r"GiB.*engine\.gpu_memory_utilization = 1e-06"):
        driver_of(tmp_path, gpu_memory_utilization=1e-6)
    driver = driver_of(tmp_path)
    driver.submit("a", [5, 6], 4)
    driver.run()
    assert driver.finished("a").reason == "length"
    driver.close()


def test_nvml_reads_this_gpu() -> None:
    nvml = open_nvml()
    assert nvml is not None, "nvidia-ml-py is missing: pip install '.[gpu]'"
    held = torch.ones(2**28, device="cuda")  # 1 GiB
    torch.cuda.synchronize()
    reading = next(iter(nvml.read().values()))
    assert reading.memory_used_bytes is None or reading.memory_used_bytes >= held.nbytes
    for ratio in (reading.utilization_ratio, reading.memory_busy_ratio, reading.dram_bandwidth_ratio):
        assert ratio is None or 0 <= ratio <= 1
    assert reading.power_watts is None or 0 < reading.power_watts < 5000
    assert any(value is not None for value in (reading.memory_used_bytes, reading.utilization_ratio))
    nvml.close()
