"""Slot state on the device: one row for each slot, written when the slot is opened, and after that by steps alone.

The tokens of a sequence live in the token pool: a step reads its input there and appends what it sampled, so that the
next step's input needs nothing from the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from backend_engine.core.sampler import LEAST_TEMPERATURE, SamplingRows
from backend_engine.core.slots import Slot
from backend_engine.core.step import Chunk

_SEED_SPAN = 1 << 64


class SlotRows:
    """Tensors of S slots."""

    def __init__(self, slots: int, max_model_len: int, page_size: int, device: torch.device) -> None:
        self._device = device
        most_pages = -(-max_model_len // page_size)
        self.tokens = torch.empty(slots, max_model_len, dtype=torch.int32, device=device)  # [S, max_model_len]
        self.block_tables = torch.zeros(slots, most_pages, dtype=torch.int64, device=device)  # [S, pages]
        self.temperature = torch.ones(slots, dtype=torch.float32, device=device)
        self.top_k = torch.zeros(slots, dtype=torch.int64, device=device)
        self.top_p = torch.ones(slots, dtype=torch.float32, device=device)
        self.seed = torch.zeros(slots, dtype=torch.int64, device=device)

    def open(self, slot: Slot) -> None:
        """Writes a new owner's row."""
        row = slot.index
        self.tokens[row, : len(slot.prompt)] = torch.tensor(slot.prompt, dtype=torch.int32)
        self.block_tables[row, : len(slot.pages)] = torch.tensor(slot.pages)
        self.temperature[row] = slot.sampling.temperature
        self.top_k[row] = slot.sampling.top_k
        self.top_p[row] = slot.sampling.top_p
        seed = slot.seed % _SEED_SPAN
        self.seed[row] = seed - _SEED_SPAN if seed >= _SEED_SPAN // 2 else seed

    def sampling(self, chunks: Sequence[Chunk], slots: torch.Tensor, positions: torch.Tensor) -> SamplingRows | None:
        """Sampling state of those sampled rows that are not greedy; None when all are.

        `chunks` are the step's sampled ones; `slots` and `positions` [N] are theirs, the latter of the sampled token.
        """
        asked = [chunk.request.sampling for chunk in chunks]
        random = [row for row, sampling in enumerate(asked) if sampling.temperature >= LEAST_TEMPERATURE]
        if not random:
            return None
        rows = torch.tensor(random, device=self._device)
        slots = slots[rows]
        return SamplingRows(
            rows=rows,
            temperature=self.temperature[slots],
            top_k=self.top_k[slots],
            top_p=self.top_p[slots],
            seed=self.seed[slots],
            position=positions[rows],
            cuts=any(asked[row].top_k > 0 or asked[row].top_p < 1 for row in random),
        )

    def append(self, slots: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> None:
        """Writes sampled tokens [N] into the pool."""
        self.tokens[slots, positions] = tokens.to(torch.int32)
