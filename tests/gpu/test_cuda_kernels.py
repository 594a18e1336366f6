"""The slot kernels on the GPU: Triton's and torch's leave the same state, whatever the slots hold."""

from __future__ import annotations

import msgspec
import pytest
import torch

from backend_engine.kernels import slot_torch
from backend_engine.kernels.slot_tensors import OWN_POSITION, SlotTensors

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
SLOTS, LENGTH, PAGE, VOCAB = 64, 96, 8, 50


def random_slots(generator: torch.Generator) -> SlotTensors:
    """Slots in every state: empty and full rows, done ones, with and without stop ids and penalties."""

    def numbers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    prompt = numbers(1, LENGTH // 2, SLOTS)
    length = (prompt + numbers(0, LENGTH // 2, SLOTS)).clamp(max=LENGTH - 1)
    pages = -(-LENGTH // PAGE)
    return SlotTensors(
        tokens=numbers(0, VOCAB, SLOTS, LENGTH),
        block_tables=torch.randperm(SLOTS * pages, generator=generator).to(torch.int32).view(SLOTS, pages),
        stop_ids=numbers(-1, VOCAB, SLOTS, 3),
        prompt_length=prompt,
        length=length,
        limit=(length + numbers(1, 4, SLOTS)).clamp(max=LENGTH),
        position=length - 1,
        next_kv_row=numbers(0, SLOTS * LENGTH, SLOTS).long(),
        is_done=numbers(0, 4, SLOTS).eq(0).to(torch.int32),
        counts=numbers(0, 3, SLOTS, VOCAB),
        counts_tokens=numbers(0, 2, SLOTS),
        page_size=PAGE,
    )


def on_gpu(slots: SlotTensors) -> SlotTensors:
    moved = {
        name: value.to(DEVICE, copy=True) if isinstance(value, torch.Tensor) else value
        for name, value in msgspec.structs.asdict(slots).items()
    }
    return SlotTensors(**moved)


def assert_same(one: object, other: object) -> None:
    for name in type(one).__struct_fields__:  # type: ignore[attr-defined]
        left, right = getattr(one, name), getattr(other, name)
        if isinstance(left, torch.Tensor):
            assert torch.equal(left.cpu(), right.cpu()), name
        else:
            assert left == right, name


@pytest.mark.parametrize("seed", range(20))
def test_advance_and_gather_leave_what_torchs_twin_leaves(seed: int) -> None:
    from backend_engine.kernels import slot_triton

    generator = torch.Generator().manual_seed(seed)
    slots = random_slots(generator)
    twin = on_gpu(slots)
    rows = torch.randperm(SLOTS, generator=generator)[: 1 + seed * 3]
    for _ in range(3):
        sampled = torch.randint(-1, VOCAB, (len(rows),), generator=generator)
        ends = slot_torch.advance(slots, rows, sampled)
        assert torch.equal(slot_triton.advance(twin, rows.to(DEVICE), sampled.to(DEVICE)).cpu(), ends)
        assert_same(slots, twin)
    asked = rows.repeat(2)
    positions = torch.cat([torch.full((len(rows),), OWN_POSITION), torch.zeros(len(rows), dtype=torch.long)])
    plain = slot_torch.gather_input(slots, asked, positions)
    assert_same(plain, slot_triton.gather_input(twin, asked.to(DEVICE), positions.to(DEVICE)))
