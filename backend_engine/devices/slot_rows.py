"""Slot state on the device: one row for each slot, written when the slot is opened, and after that by steps alone.

The tokens of a sequence live in the token pool: a step reads its input there and appends what it sampled, so that the
next step's input needs nothing from the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from backend_engine.core.messages import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, Sampling
from backend_engine.core.slots import NewPage, Opening
from backend_engine.core.step import Chunk, RowMask
from backend_engine.devices.memory import lazy_zeros, to_device
from backend_engine.kernels.slot_tensors import NOWHERE, OWN_POSITION, SlotTensors, StepInput
from backend_engine.kernels.slot_update import kernels_for

_SEED_SPAN = 1 << 64
_MASK_BITS = 32


class SlotRows:
    """Tensors of S slots.

    The token pool takes 4 bytes for each slot and position, and token counts 5 for each slot and id of the vocabulary.
    On a CPU the system hands out that memory when it is first written, so a long `max_model_len` costs only what
    sequences use of it; on CUDA it is all taken at the start.
    """

    def __init__(self, slots: int, max_model_len: int, page_size: int, vocab: int, device: torch.device) -> None:
        self._device = device
        self._page_size = page_size
        self._advance, self._gather_input = kernels_for(device)
        most_pages = -(-max_model_len // page_size)

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return lazy_zeros(shape, dtype, device)

        self.state = SlotTensors(
            tokens=zeros(slots, max_model_len),
            block_tables=zeros(slots, most_pages),
            stop_ids=zeros(slots, MAX_STOP_TOKEN_IDS).fill_(-1),
            prompt_length=zeros(slots),
            length=zeros(slots),
            limit=zeros(slots),
            position=zeros(slots),
            next_kv_row=zeros(slots, dtype=torch.int64).fill_(NOWHERE),
            is_done=zeros(slots).fill_(1),
            counts=zeros(slots, vocab),
            counts_tokens=zeros(slots),
            page_size=page_size,
        )
        self.prompt_holds = zeros(
            slots, vocab, dtype=torch.bool
        )  # which ids the prompt holds, where tokens are counted
        floats = zeros(6, slots, dtype=torch.float32)
        self.temperature, self.top_p, self.min_p, self.repetition, self.presence, self.frequency = floats
        self._floats = floats
        self.top_k = zeros(slots, dtype=torch.int64)
        self.seed = zeros(slots, dtype=torch.int64)
        self.min_tokens = zeros(slots)
        self.bias_ids = zeros(slots, MAX_LOGIT_BIAS, dtype=torch.int64)
        self.bias_values = zeros(slots, MAX_LOGIT_BIAS, dtype=torch.float32)
        self.masks = zeros(slots, -(-vocab // _MASK_BITS))  # lowest bit first
        self._counting: set[int] = set()

    @property
    def most_bytes(self) -> int:
        """What all of it takes; on a CPU, once every row was used to its end."""
        tensors = [getattr(self.state, name) for name in self.state.__struct_fields__] + list(vars(self).values())
        return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))

    # -- written by the host -----------------------------------------------------------------------------------------

    def open(self, openings: Sequence[Opening]) -> None:
        """Writes rows whole. One that keeps its progress keeps what a step in flight makes of it."""
        if not openings:
            return
        rows = self._ids([opening.slot for opening in openings])
        self._write_sampling(rows, openings)
        self._write_pages(openings)
        fresh = [opening for opening in openings if not opening.keeps_progress]
        if fresh:
            self._write_tokens(fresh)
            self._count_tokens(fresh)

    def add_pages(self, pages: Sequence[NewPage]) -> None:
        """Extends block tables."""
        if pages:
            slots, at, numbers = zip(*((page.slot, page.at, page.page) for page in pages), strict=True)
            self.state.block_tables[self._ids(slots), self._ids(at)] = self._numbers(numbers, np.int32)

    def set_masks(self, masks: Sequence[RowMask]) -> None:
        """Says which tokens rows may sample next."""
        for mask in masks:
            words = np.frombuffer(mask.allowed, np.dtype("<i4")).astype(np.int32)
            self.masks[mask.slot] = self._numbers(words, np.int32)

    def _write_sampling(self, rows: torch.Tensor, openings: Sequence[Opening]) -> None:
        asked = [opening.sampling for opening in openings]
        floats = [
            (s.temperature, s.top_p, s.min_p, s.repetition_penalty, s.presence_penalty, s.frequency_penalty)
            for s in asked
        ]
        self._floats[:, rows] = self._numbers(np.array(floats, np.float32).T, np.float32)
        self.top_k[rows] = self._ids([s.top_k for s in asked])
        self.min_tokens[rows] = self._numbers([s.min_tokens for s in asked], np.int32)
        self.seed[rows] = self._ids([_signed(opening.seed) for opening in openings])
        stops = np.full((len(asked), MAX_STOP_TOKEN_IDS), -1, np.int32)
        for row, sampling in enumerate(asked):
            stops[row, : len(sampling.stop_token_ids)] = sampling.stop_token_ids
        self.state.stop_ids[rows] = self._numbers(stops, np.int32)
        for opening in openings:
            bias = opening.sampling.logit_bias
            if bias:
                self.bias_ids[opening.slot].zero_()
                self.bias_values[opening.slot].zero_()
                self.bias_ids[opening.slot, : len(bias)] = self._ids([token for token, _ in bias])
                self.bias_values[opening.slot, : len(bias)] = self._numbers([value for _, value in bias], np.float32)

    def _write_pages(self, openings: Sequence[Opening]) -> None:
        slots, at = _ragged([opening.slot for opening in openings], [len(opening.pages) for opening in openings])
        pages = np.fromiter((page for opening in openings for page in opening.pages), np.int32, len(at))
        self.state.block_tables[self._ids(slots), self._ids(at)] = self._numbers(pages, np.int32)

    def _write_tokens(self, openings: Sequence[Opening]) -> None:
        state, size = self.state, self._page_size
        lengths = [len(opening.tokens) for opening in openings]
        slots, at = _ragged([opening.slot for opening in openings], lengths)
        tokens = np.concatenate([np.array(opening.tokens, np.int32) for opening in openings])
        state.tokens[self._ids(slots), self._ids(at)] = self._numbers(tokens, np.int32)
        rows = self._ids([opening.slot for opening in openings])
        newest = [length - 1 for length in lengths]
        pages = [opening.pages[at // size] for opening, at in zip(openings, newest, strict=True)]
        kv_rows = [page * size + at % size for page, at in zip(pages, newest, strict=True)]
        state.length[rows] = self._numbers(lengths, np.int32)
        state.position[rows] = self._numbers(newest, np.int32)
        state.prompt_length[rows] = self._numbers([opening.prompt_tokens for opening in openings], np.int32)
        state.limit[rows] = self._numbers([opening.most_tokens for opening in openings], np.int32)
        state.next_kv_row[rows] = self._ids(kv_rows)
        state.is_done[rows] = 0

    def _count_tokens(self, openings: Sequence[Opening]) -> None:
        """Counts what prompt and answer hold, for rows with a penalty; forgets what was counted for owners before."""
        state = self.state
        for opening in openings:
            row = opening.slot
            if row in self._counting:
                state.counts[row].zero_()
                self.prompt_holds[row] = False
                self._counting.discard(row)
            if has_penalty(opening.sampling):
                self._counting.add(row)
                tokens = self._ids(opening.tokens)
                self.prompt_holds[row, tokens[: opening.prompt_tokens]] = True
                answer = tokens[opening.prompt_tokens :]
                state.counts[row].index_add_(0, answer, torch.ones_like(answer, dtype=torch.int32))
        rows = self._ids([opening.slot for opening in openings])
        counted = [has_penalty(opening.sampling) for opening in openings]
        state.counts_tokens[rows] = self._numbers(counted, np.int32)

    def _ids(self, values: Sequence[int] | np.ndarray) -> torch.Tensor:
        return self._numbers(values, np.int64)

    def _numbers(self, values: Sequence[object] | np.ndarray, dtype: type) -> torch.Tensor:
        return to_device(values, dtype, self._device)

    # -- moved on by steps -------------------------------------------------------------------------------------------

    def gather(self, chunks: Sequence[Chunk]) -> StepInput:
        """The input of a step, one row for each of its tokens."""
        counts = [chunk.count for chunk in chunks]
        slots, at = _ragged([chunk.slot for chunk in chunks], counts)
        starts = np.repeat(np.array([chunk.start for chunk in chunks]), counts)
        decodes = np.repeat(np.array([chunk.decodes for chunk in chunks]), counts)
        positions = np.where(decodes, OWN_POSITION, at + starts)
        return self._gather_input(self.state, self._ids(slots), self._ids(positions))

    def gather_newest(self, slots: torch.Tensor) -> StepInput:
        """The input of a step that decodes `slots` [N] int64; nothing of it comes from the host."""
        return self._gather_input(self.state, slots, torch.full_like(slots, OWN_POSITION))

    def advance(self, slots: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
        """Appends sampled ids [N] to the rows of `slots` [N] int64; what became of each, [N] int32."""
        return self._advance(self.state, slots, sampled)

    def slot_ids(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """The slots of these chunks, [N] int64, where the kernels read them."""
        return self._ids([chunk.slot for chunk in chunks])


def has_penalty(sampling: Sampling) -> bool:
    """Whether what was sampled changes what is sampled next."""
    return sampling.repetition_penalty != 1 or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0


def _ragged(values: Sequence[int], counts: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Each value as often as its count says, and 0, 1, 2, ... beside it."""
    repeated = np.repeat(np.array(values, np.int64), counts)
    ends = np.cumsum(counts)
    return repeated, np.arange(len(repeated)) - np.repeat(ends - counts, counts)


def _signed(seed: int) -> int:
    seed %= _SEED_SPAN
    return seed - _SEED_SPAN if seed >= _SEED_SPAN // 2 else seed
