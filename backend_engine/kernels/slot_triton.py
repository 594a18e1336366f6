"""The slot kernels in Triton: one launch for all rows, one program for each. Twin of `slot_torch`.

Run on the CPU by Triton's interpreter in the tests; on CUDA unverified so far.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from backend_engine.kernels.slot_tensors import (
    GOES_ON,
    HAD_NO_NUMBERS,
    NOWHERE,
    REACHED_LIMIT,
    STOPPED,
    WAS_DONE,
    SlotTensors,
    StepInput,
)

_GOES_ON, _STOPPED, _REACHED_LIMIT = tl.constexpr(GOES_ON), tl.constexpr(STOPPED), tl.constexpr(REACHED_LIMIT)
_HAD_NO_NUMBERS, _WAS_DONE, _NOWHERE = tl.constexpr(HAD_NO_NUMBERS), tl.constexpr(WAS_DONE), tl.constexpr(NOWHERE)
_BLOCK_ROWS = 128


@triton.jit
def _advance_kernel(
    rows_ptr, sampled_ptr, ends_ptr, tokens_ptr, tables_ptr, stop_ids_ptr, length_ptr, limit_ptr, position_ptr,
    next_kv_row_ptr, is_done_ptr, counts_ptr, counts_tokens_ptr,
    row_tokens, row_pages, row_stops, vocab, page_size,
    STOPS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    slot = tl.load(rows_ptr + program)
    token = tl.load(sampled_ptr + program).to(tl.int32)
    was_done = tl.load(is_done_ptr + slot) != 0
    has_token = (token >= 0) & (was_done == 0)
    length = tl.load(length_ptr + slot)
    tl.store(tokens_ptr + slot * row_tokens + length, token, mask=has_token & (length < row_tokens))
    grown = length + has_token.to(tl.int32)
    tl.store(length_ptr + slot, grown)
    tl.store(position_ptr + slot, grown - 1)

    column = tl.arange(0, STOPS)
    stop_ids = tl.load(stop_ids_ptr + slot * row_stops + column, mask=column < row_stops, other=-1)
    stops = (tl.max((stop_ids == token).to(tl.int32), axis=0) > 0) & has_token
    is_full = (grown >= tl.load(limit_ptr + slot)) & has_token
    end = tl.where(is_full, _REACHED_LIMIT, _GOES_ON)
    end = tl.where(stops, _STOPPED, end)
    end = tl.where(has_token, end, _HAD_NO_NUMBERS)
    end = tl.where(was_done, _WAS_DONE, end)
    tl.store(ends_ptr + program, end)
    is_done = end != _GOES_ON
    tl.store(is_done_ptr + slot, is_done.to(tl.int32))

    position = tl.maximum(grown - 1, 0)
    page = tl.load(tables_ptr + slot * row_pages + position // page_size).to(tl.int64)
    kv_row = page * page_size + position % page_size
    tl.store(next_kv_row_ptr + slot, tl.where(is_done, _NOWHERE, kv_row))
    is_counted = has_token & (tl.load(counts_tokens_ptr + slot) != 0)
    count_ptr = counts_ptr + slot * vocab + tl.maximum(token, 0)
    tl.store(count_ptr, tl.load(count_ptr, mask=is_counted, other=0) + 1, mask=is_counted)


@triton.jit
def _gather_kernel(
    rows_ptr, positions_ptr, ids_ptr, out_positions_ptr, kv_rows_ptr, tokens_ptr, tables_ptr, position_ptr,
    next_kv_row_ptr, is_done_ptr, row_tokens, row_pages, page_size, count,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = row < count
    slot = tl.load(rows_ptr + row, mask=is_row, other=0)
    asked = tl.load(positions_ptr + row, mask=is_row, other=0)
    decodes = asked < 0
    at = tl.where(decodes, tl.load(position_ptr + slot, mask=is_row, other=0).to(tl.int64), asked)
    page = tl.load(tables_ptr + slot * row_pages + at // page_size, mask=is_row, other=0).to(tl.int64)
    kv_row = page * page_size + at % page_size
    kv_row = tl.where(decodes, tl.load(next_kv_row_ptr + slot, mask=is_row, other=0), kv_row)
    is_done = tl.load(is_done_ptr + slot, mask=is_row, other=0) != 0
    token = tl.load(tokens_ptr + slot * row_tokens + at, mask=is_row, other=0)
    tl.store(ids_ptr + row, token.to(tl.int64), mask=is_row)
    tl.store(out_positions_ptr + row, at, mask=is_row)
    tl.store(kv_rows_ptr + row, tl.where(is_done, _NOWHERE, kv_row), mask=is_row)


def advance(slots: SlotTensors, rows: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
    """See `slot_torch.advance`."""
    ends = torch.empty(len(rows), dtype=torch.int32, device=rows.device)
    if len(rows):
        _advance_kernel[(len(rows),)](
            rows, sampled, ends, slots.tokens, slots.block_tables, slots.stop_ids, slots.length, slots.limit,
            slots.position, slots.next_kv_row, slots.is_done, slots.counts, slots.counts_tokens,
            slots.tokens.shape[1], slots.block_tables.shape[1], slots.stop_ids.shape[1], slots.counts.shape[1],
            slots.page_size,
            STOPS=triton.next_power_of_2(slots.stop_ids.shape[1]),
        )  # fmt: skip
    return ends


def gather_input(slots: SlotTensors, rows: torch.Tensor, positions: torch.Tensor) -> StepInput:
    """See `slot_torch.gather_input`."""
    out = StepInput(torch.empty_like(positions), torch.empty_like(positions), torch.empty_like(positions))
    _gather_kernel[(triton.cdiv(len(rows), _BLOCK_ROWS),)](
        rows, positions, out.ids, out.positions, out.kv_rows, slots.tokens, slots.block_tables, slots.position,
        slots.next_kv_row, slots.is_done, slots.tokens.shape[1], slots.block_tables.shape[1], slots.page_size,
        len(rows),
        BLOCK=_BLOCK_ROWS,
    )  # fmt: skip
    return out
