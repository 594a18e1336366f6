"""What the slot kernels read and write: the part of the slots' state that steps move on."""

from __future__ import annotations

import msgspec
import torch

GOES_ON, STOPPED, REACHED_LIMIT, HAD_NO_NUMBERS, WAS_DONE = range(5)
"""What `advance` says of each sampled row."""
OWN_POSITION = -1
"""In place of a position: the slot's own, which only the device knows."""
NOWHERE = -1
"""In place of a KV row: this row's keys and values are not kept."""


class SlotTensors(msgspec.Struct, frozen=True):
    """Tensors of S slots on one device. The host writes a slot's row when it is taken; after that, kernels do."""

    tokens: torch.Tensor  # [S, max_model_len] int32
    block_tables: torch.Tensor  # [S, pages] int32
    stop_ids: torch.Tensor  # [S, K] int32, padded with -1
    prompt_length: torch.Tensor  # [S] int32
    length: torch.Tensor  # [S] int32, tokens in the row
    limit: torch.Tensor  # [S] int32, the row is done when it has this many
    position: torch.Tensor  # [S] int32, of the newest token: the next one that is computed
    next_kv_row: torch.Tensor  # [S] int64, where its keys and values go; NOWHERE once the row is done
    is_done: torch.Tensor  # [S] int32, 0 or 1
    counts: torch.Tensor  # [S, vocab] int32, how often the answer holds each token; counted where `counts_tokens`
    counts_tokens: torch.Tensor  # [S] int32, 0 or 1: the slot has a penalty
    page_size: int


class StepInput(msgspec.Struct, frozen=True):
    """What a forward reads, one row for each token of the step."""

    ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    kv_rows: torch.Tensor  # [T] int64
