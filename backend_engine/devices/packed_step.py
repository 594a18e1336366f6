"""One step as the model sees it: the tokens of all sequences packed in one row, and where their keys and values go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np
import torch

from backend_engine.devices.kv_cache import KvCache
from backend_engine.devices.memory import to_device
from backend_engine.devices.single_rows import SingleRows, by_length, reads_in_place
from backend_engine.kernels.slot_tensors import StepInput
from backend_engine.models.attention import LayerCall, attend_one
from backend_engine.models.lean import LeanDecoder, RunnableStep


class Piece(Protocol):
    """One sequence's part in a step."""

    @property
    def slot(self) -> int: ...

    @property
    def start(self) -> int: ...

    @property
    def count(self) -> int: ...

    @property
    def samples(self) -> bool: ...


class Span(msgspec.Struct, frozen=True):
    """One sequence's rows in the packed step, and its pages."""

    first_row: int
    start: int
    count: int
    pages: torch.Tensor  # [pages that hold positions 0 to start + count] int64


class PackedStep:
    """T tokens of all sequences. It is handed to the model's forward and met again in each layer's attention."""

    def __init__(self, pieces: Sequence[Piece], given: StepInput, block_tables: torch.Tensor, cache: KvCache) -> None:
        """`given` holds the step's rows in the order of `pieces`; `block_tables` [S, pages] is read here only."""
        device = given.ids.device
        size = cache.page_size
        ends = np.cumsum([piece.count for piece in pieces])
        first_rows = [int(end) - piece.count for piece, end in zip(pieces, ends, strict=True)]
        self._cache = cache
        self._kv_rows = cache.kept_rows(given.kv_rows)  # [T]
        in_place = [at for at, piece in enumerate(pieces) if piece.count == 1] if reads_in_place(cache) else []
        self._singles = [
            SingleRows(
                [first_rows[in_place[at]] for at in group],
                [pieces[in_place[at]].slot for at in group],
                [pieces[in_place[at]].start + 1 for at in group],
                block_tables,
                cache,
            )
            for group in by_length([pieces[at].start + 1 for at in in_place])
        ]
        gathered = sorted(set(range(len(pieces))).difference(in_place))
        self._spans = [
            Span(
                first_rows[at],
                pieces[at].start,
                pieces[at].count,
                block_tables[pieces[at].slot, : -(-(pieces[at].start + pieces[at].count) // size)],
            )
            for at in gathered
        ]
        self._is_one_group = len(self._singles) == 1 and not self._spans  # as decode steps are, nearly always
        self.input_ids = given.ids[None]  # [1, T]
        self.position_ids = given.positions[None]  # [1, T]
        self.sampled_rows = last_rows(pieces, device)  # [N]

    @classmethod
    def of(
        cls, pieces: Sequence[Piece], tokens: torch.Tensor, block_tables: torch.Tensor, cache: KvCache
    ) -> PackedStep:
        """A step of tokens that the host knows: `tokens` [S, longest], `block_tables` [S, pages]."""
        return cls(pieces, input_of(pieces, tokens, block_tables, cache.page_size), block_tables, cache)

    def attend(self, call: LayerCall) -> torch.Tensor:
        """Stores the step's keys and values, then attends each sequence over its own; [T, heads, value_dim]."""
        self._cache.write(call.layer, self._kv_rows, call.key, call.value)
        if self._is_one_group:
            return self._singles[0].attend(call)
        out = call.query.new_empty(*call.query.shape[:2], call.value.shape[2])
        for single in self._singles:
            out[single.rows] = single.attend(call)
        for span in self._spans:
            rows = slice(span.first_row, span.first_row + span.count)
            if span.start == 0:
                keys, values = call.key[rows], call.value[rows]
            else:
                keys, values = self._gather(call, span)
            out[rows] = attend_one(call, call.query[rows], keys, values)
        return out

    def _gather(self, call: LayerCall, span: Span) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values that the span's rows can see: all before its end, or a sliding window's reach."""
        size = self._cache.page_size
        end = span.start + span.count
        first = 0 if call.window is None else max(0, span.start - call.window + 1)
        first_page = first // size
        keys, values = self._cache.gather(call.layer, span.pages[first_page:])
        seen = slice(first - first_page * size, end - first_page * size)
        return keys[seen], values[seen]


def input_of(pieces: Sequence[Piece], tokens: torch.Tensor, block_tables: torch.Tensor, page_size: int) -> StepInput:
    """The rows of a step of tokens that the host knows: `tokens` [S, longest], `block_tables` [S, pages]."""
    slots = torch.tensor([piece.slot for piece in pieces for _ in range(piece.count)])
    at = torch.tensor([piece.start + offset for piece in pieces for offset in range(piece.count)])
    slots, at = slots.to(tokens.device), at.to(tokens.device)
    kv_rows = block_tables[slots, at // page_size].long() * page_size + at % page_size
    return StepInput(tokens[slots, at].long(), at, kv_rows)


def last_rows(pieces: Sequence[Piece], device: torch.device) -> torch.Tensor:
    """The rows of a step that sample: the last of each piece that does, [N] int64."""
    ends = np.cumsum([piece.count for piece in pieces])
    return to_device([end - 1 for piece, end in zip(pieces, ends, strict=True) if piece.samples], np.int64, device)


Model = torch.nn.Module | LeanDecoder
"""A transformers model, run by its own code; or its weights, run by ours."""


def logits_of(model: Model, step: RunnableStep) -> torch.Tensor:
    """The model's logits at the rows that sample, [N, vocab]: lm_head runs on those rows alone."""
    if isinstance(model, LeanDecoder):
        return model.logits(step)
    out = model(
        input_ids=step.input_ids,
        position_ids=step.position_ids,
        use_cache=False,
        logits_to_keep=step.sampled_rows,
        packed_step=step,
    )
    logits: torch.Tensor = out.logits[0]
    return logits
