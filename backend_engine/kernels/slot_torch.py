"""The slot kernels in torch: vectorised over the rows, no Python for each of them."""

from __future__ import annotations

import torch

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


def advance(slots: SlotTensors, rows: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
    """After sampling: appends each sampled id to its slot's row, moves the row on, and finds out whether that was its
    last. `rows` [N] int64 are the slots, each at most once; `sampled` [N] int64. Returns [N] int32, what became of
    each. A row that was done stays as it is."""
    token = sampled.to(torch.int32)
    was_done = slots.is_done[rows] != 0
    has_token = ~was_done & (token >= 0)
    length = slots.length[rows]
    at = length.clamp(max=slots.tokens.shape[1] - 1).long()
    slots.tokens[rows, at] = torch.where(has_token, token, slots.tokens[rows, at])
    grown = length + has_token.to(torch.int32)
    slots.length[rows] = grown
    slots.position[rows] = grown - 1

    stops = (slots.stop_ids[rows] == token[:, None]).any(dim=1) & has_token
    is_full = (grown >= slots.limit[rows]) & has_token
    ends = torch.full_like(token, GOES_ON)
    ends.masked_fill_(is_full, REACHED_LIMIT).masked_fill_(stops, STOPPED)
    ends.masked_fill_(~has_token, HAD_NO_NUMBERS).masked_fill_(was_done, WAS_DONE)
    is_done = ends != GOES_ON
    slots.is_done[rows] = is_done.to(torch.int32)

    position = (grown - 1).clamp(min=0)
    page = slots.block_tables[rows, (position // slots.page_size).long()].long()
    slots.next_kv_row[rows] = (page * slots.page_size + position % slots.page_size).masked_fill_(is_done, NOWHERE)
    counted = (has_token & (slots.counts_tokens[rows] != 0)).to(torch.int32)
    slots.counts[rows, token.clamp(min=0).long()] += counted
    return ends


def gather_input(slots: SlotTensors, rows: torch.Tensor, positions: torch.Tensor) -> StepInput:
    """The next step's input: `rows` [T] int64 are slots, `positions` [T] int64 are where in them (OWN_POSITION for the
    newest token of a row that decodes)."""
    decodes = positions < 0
    at = torch.where(decodes, slots.position[rows].long(), positions)
    page = slots.block_tables[rows, at // slots.page_size].long()
    kv_rows = page * slots.page_size + at % slots.page_size
    kv_rows = torch.where(decodes, slots.next_kv_row[rows], kv_rows).masked_fill_(slots.is_done[rows] != 0, NOWHERE)
    return StepInput(slots.tokens[rows, at].long(), at, kv_rows)
