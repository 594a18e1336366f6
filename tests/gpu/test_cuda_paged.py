"""Attention over the paged cache as it lies, and recorded decode steps: on the GPU that they are for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_support import ORDERS, Driver, prompts, settings_of, write_tiny_model
from paged_reference import paged_attention

from backend_engine.devices.forwards import PackedForward, PagedForward
from backend_engine.devices.opening import open_device
from backend_engine.devices.paged_step import flash_attention
from backend_engine.devices.torch_device import TorchDevice
from tracing.clock import SystemClock

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
KINDS = ("llama with grouped queries", "mistral with a sliding window")
LENGTHS = (1, 2, 5, 9, 16, 17, 33, 40)
OUTPUTS = (1, 7, 20, 13, 30, 4, 18, 25)
PAGE_SIZE = 256


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("window", [(-1, 0), (99, 0)], ids=str)
@pytest.mark.parametrize("heads", [(8, 8), (8, 2)], ids=str)
def test_the_kernel_gives_what_it_gives_written_out(
    dtype: torch.dtype, window: tuple[int, int], heads: tuple[int, int]
) -> None:
    generator = torch.Generator().manual_seed(3)
    counts, lengths = [1, 300, 17, 1, 1], [700, 300, 530, 1, 256]
    pages = 3

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    query = numbers(sum(counts), heads[0], 64)
    keys, values = (numbers(5 * pages, PAGE_SIZE, heads[1], 64) for _ in range(2))
    ends = [torch.tensor([0, *torch.tensor(some).cumsum(0).tolist()], dtype=torch.int32) for some in (counts, lengths)]
    table = torch.randperm(5 * pages, generator=generator).to(torch.int32).view(5, pages)
    seen = torch.tensor(lengths, dtype=torch.int32)
    how: dict[str, Any] = {"scale": 0.2, "window_size": window, "enable_gqa": heads[0] != heads[1]}
    expected = paged_attention(query, keys, values, *ends, 300, 700, seqused_k=seen, block_table=table, **how)
    found = flash_attention()(
        query.to(DEVICE, dtype), keys.to(DEVICE, dtype), values.to(DEVICE, dtype), *(end.to(DEVICE) for end in ends),
        300, 700, seqused_k=seen.to(DEVICE), block_table=table.to(DEVICE), **how,
    )  # fmt: skip
    torch.testing.assert_close(found.float().cpu(), expected, rtol=0.03, atol=0.03)


def device_of(folder: Path, order: str, **engine: Any) -> tuple[TorchDevice, Driver]:
    settings = settings_of(
        engine={
            "model": str(folder), "device": DEVICE, "dtype": "bfloat16", "page_size": PAGE_SIZE,
            "gpu_memory_utilization": 0.2, **engine,
        },
        scheduler={"max_num_seqs": 5, "max_num_batched_tokens": 24},
        token_interval=ORDERS[order],
    )  # fmt: skip
    clock = SystemClock()
    device = open_device(settings, clock)
    assert isinstance(device, TorchDevice)
    return device, Driver(device, settings, clock)


def played(driver: Driver) -> list[list[int]]:
    """A mixed batch that comes bit by bit; everybody's tokens."""
    for turn, (name, prompt, max_tokens) in enumerate(zip("abcdefgh", prompts(LENGTHS), OUTPUTS, strict=True)):
        driver.submit(name, prompt, max_tokens)
        for _ in range(turn % 3):
            driver.turn()
    driver.run()
    driver.close()
    return [driver.tokens(name) for name in "abcdefgh"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", ["in order", "pipelined"])
def test_the_three_ways_to_run_a_step_give_the_same_answers(kind: str, order: str, tmp_path: Path) -> None:
    """But for what rounding in 16 bits does to two likely tokens: one answer of the eight may differ."""
    write_tiny_model(tmp_path, kind)
    gathered, driver = device_of(tmp_path, order, page_size=16)
    assert isinstance(gathered._forward, PackedForward)
    expected = played(driver)
    for records in (False, True):
        device, driver = device_of(tmp_path, order, cuda_graphs=records)
        assert isinstance(device._forward, PagedForward), "flash attention refused; the log says why"
        assert (device._forward._graphs is not None) == records, "nothing was recorded; the log says why"
        found = played(driver)
        assert [len(answer) for answer in found] == list(OUTPUTS)
        assert sum(one != other for one, other in zip(found, expected, strict=True)) <= 1
