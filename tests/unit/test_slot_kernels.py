"""The slot kernels: the torch twin against a plain loop, and Triton's kernels, interpreted, against the torch twin."""

from __future__ import annotations

import copy
import os
import random
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backend_engine.devices.slot_rows import SlotRows
from backend_engine.kernels import slot_torch
from backend_engine.kernels.slot_tensors import (
    GOES_ON,
    HAD_NO_NUMBERS,
    NOWHERE,
    OWN_POSITION,
    REACHED_LIMIT,
    STOPPED,
    WAS_DONE,
    SlotTensors,
    StepInput,
)

SLOTS, LONGEST, PAGE_SIZE, STOPS, VOCAB = 6, 20, 4, 3, 9
FIELDS = [name for name in SlotTensors.__struct_fields__ if name != "page_size"]


def random_slots(seed: int) -> SlotTensors:
    """Slots in the middle of sequences; some are done, one has no room left."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    length = numbers(1, LONGEST, SLOTS)
    length[0] = LONGEST - 1
    is_done = numbers(0, 3, SLOTS) // 2
    next_kv_row = torch.where(is_done != 0, NOWHERE, numbers(0, 99, SLOTS)).long()
    return SlotTensors(
        tokens=numbers(0, VOCAB, SLOTS, LONGEST),
        block_tables=numbers(0, 30, SLOTS, LONGEST // PAGE_SIZE),
        stop_ids=numbers(-1, VOCAB, SLOTS, STOPS),
        prompt_length=torch.ones(SLOTS, dtype=torch.int32),
        length=length,
        limit=torch.minimum(length + numbers(1, 4, SLOTS), torch.tensor(LONGEST, dtype=torch.int32)),
        position=length - 1,
        next_kv_row=next_kv_row,
        is_done=is_done,
        counts=numbers(0, 3, SLOTS, VOCAB),
        counts_tokens=numbers(0, 2, SLOTS),
        page_size=PAGE_SIZE,
    )


def advance_by_hand(slots: SlotTensors, rows: list[int], sampled: list[int]) -> list[int]:
    """What `advance` must do, one row after the other."""
    ends = []
    for row, token in zip(rows, sampled, strict=True):
        if slots.is_done[row]:
            slots.next_kv_row[row] = NOWHERE
            ends.append(WAS_DONE)
            continue
        if token < 0:
            slots.is_done[row], slots.next_kv_row[row] = 1, NOWHERE
            ends.append(HAD_NO_NUMBERS)
            continue
        at = int(slots.length[row])
        slots.tokens[row, at] = token
        slots.length[row] = at + 1
        slots.position[row] = at
        if slots.counts_tokens[row]:
            slots.counts[row, token] += 1
        if token in slots.stop_ids[row].tolist():
            end = STOPPED
        else:
            end = REACHED_LIMIT if at + 1 >= slots.limit[row] else GOES_ON
        ends.append(end)
        slots.is_done[row] = int(end != GOES_ON)
        page = int(slots.block_tables[row, at // PAGE_SIZE])
        slots.next_kv_row[row] = page * PAGE_SIZE + at % PAGE_SIZE if end == GOES_ON else NOWHERE
    return ends


def gather_by_hand(slots: SlotTensors, rows: list[int], positions: list[int]) -> list[tuple[int, int, int]]:
    found = []
    for row, position in zip(rows, positions, strict=True):
        at = int(slots.position[row]) if position == OWN_POSITION else position
        kv_row = int(slots.block_tables[row, at // PAGE_SIZE]) * PAGE_SIZE + at % PAGE_SIZE
        if position == OWN_POSITION:
            kv_row = int(slots.next_kv_row[row])
        found.append((int(slots.tokens[row, at]), at, NOWHERE if slots.is_done[row] else kv_row))
    return found


def assert_same(one: SlotTensors, other: SlotTensors) -> None:
    for name in FIELDS:
        assert torch.equal(getattr(one, name), getattr(other, name)), name


def listed(given: StepInput) -> list[tuple[int, int, int]]:
    return list(zip(given.ids.tolist(), given.positions.tolist(), given.kv_rows.tolist(), strict=True))


STEPS = st.lists(
    st.tuples(st.permutations(range(SLOTS)), st.integers(0, SLOTS), st.lists(st.integers(-1, VOCAB - 1), min_size=6)),
    min_size=1,
    max_size=5,
)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**30), STEPS)
def test_advance_does_what_a_plain_loop_does(seed: int, steps: list[tuple[list[int], int, list[int]]]) -> None:
    slots = random_slots(seed)
    by_hand = copy.deepcopy(slots)
    for order, count, tokens in steps:
        rows, sampled = order[:count], tokens[:count]
        ends = slot_torch.advance(
            slots, torch.tensor(rows, dtype=torch.int64), torch.tensor(sampled, dtype=torch.int64)
        )
        assert ends.tolist() == advance_by_hand(by_hand, rows, sampled)
        assert_same(slots, by_hand)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**30), st.lists(st.tuples(st.integers(0, SLOTS - 1), st.integers(-1, LONGEST - 1)), min_size=1))
def test_gathering_the_next_input_does_what_a_plain_loop_does(seed: int, asked: list[tuple[int, int]]) -> None:
    slots = random_slots(seed)
    rows, positions = [row for row, _ in asked], [position for _, position in asked]
    given_rows = slot_torch.gather_input(slots, torch.tensor(rows), torch.tensor(positions))
    assert listed(given_rows) == gather_by_hand(slots, rows, positions)


def test_a_row_that_is_done_writes_nowhere_whatever_is_sampled_for_it() -> None:
    slots = random_slots(1)
    slots.is_done.fill_(1)
    before = copy.deepcopy(slots)
    rows = torch.arange(SLOTS)
    ends = slot_torch.advance(slots, rows, torch.zeros(SLOTS, dtype=torch.int64))
    assert ends.tolist() == [WAS_DONE] * SLOTS
    assert (
        slot_torch.gather_input(slots, rows, torch.full((SLOTS,), OWN_POSITION)).kv_rows.tolist() == [NOWHERE] * SLOTS
    )
    for name in FIELDS:
        if name != "next_kv_row":
            assert torch.equal(getattr(slots, name), getattr(before, name)), name


def test_the_triton_kernels_equal_their_twins_under_tritons_interpreter() -> None:
    """In a process of its own: whether kernels are interpreted is decided when triton is imported."""
    pytest.importorskip("triton", reason="Triton is made for Linux alone")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parent)}
    run = subprocess.run(
        [sys.executable, "-c", "import test_slot_kernels; test_slot_kernels.compare_twins()"],
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == "30 rounds are equal\n"


def compare_twins() -> None:
    """Runs in the process with the interpreter."""
    from backend_engine.kernels import slot_triton

    chance = random.Random(5)
    for seed in range(30):
        ours, theirs = random_slots(seed), random_slots(seed)
        for _ in range(3):
            rows = torch.tensor(chance.sample(range(SLOTS), chance.randint(0, SLOTS)), dtype=torch.int64)
            sampled = torch.tensor([chance.randint(-1, VOCAB - 1) for _ in rows], dtype=torch.int64)
            assert torch.equal(slot_torch.advance(ours, rows, sampled), slot_triton.advance(theirs, rows, sampled))
            assert_same(ours, theirs)
            count = chance.randint(1, 300)
            slots = torch.tensor([chance.randrange(SLOTS) for _ in range(count)])
            places = torch.tensor([chance.randint(-1, LONGEST - 1) for _ in range(count)])
            one = slot_torch.gather_input(ours, slots, places)
            other = slot_triton.gather_input(theirs, slots, places)
            assert msgspec.structs.asdict(one).keys() == msgspec.structs.asdict(other).keys()
            assert listed(one) == listed(other)
    print("30 rounds are equal")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_triton_kernels_compile_for_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Down to machine code, with the types that the pools have; no GPU is needed for that."""
    pytest.importorskip("triton", reason="Triton is made for Linux alone")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from backend_engine.kernels import slot_triton

    wide = {"rows", "sampled", "next_kv_row", "positions", "ids", "out_positions", "kv_rows"}
    for kernel, constants in (
        (slot_triton._advance_kernel, {"STOPS": 64}),
        (slot_triton._gather_kernel, {"BLOCK": 128}),
    ):
        signature = {
            name: ("*i64" if name.removesuffix("_ptr") in wide else "*i32") if name.endswith("_ptr") else "i32"
            for name in kernel.arg_names
        }
        signature |= dict.fromkeys(constants, "constexpr")
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]


def test_the_pools_have_the_types_that_the_kernels_were_compiled_for() -> None:
    rows = SlotRows(2, 16, 4, VOCAB, torch.device("cpu"))
    types = {name: getattr(rows.state, name).dtype for name in FIELDS}
    assert types.pop("next_kv_row") == torch.int64
    assert set(types.values()) == {torch.int32}
    assert all(getattr(rows.state, name).is_contiguous() for name in FIELDS)
