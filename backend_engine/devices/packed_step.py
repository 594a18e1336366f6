"""One step as the model sees it: the tokens of all sequences packed in one row, and where their keys and values go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
import torch

from backend_engine.devices.kv_cache import KvCache
from backend_engine.models.attention import LayerCall, attend_one


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

    def __init__(
        self, pieces: Sequence[Piece], tokens: torch.Tensor, block_tables: torch.Tensor, cache: KvCache
    ) -> None:
        """`tokens` is the pool [S, max_model_len], `block_tables` [S, pages]; both are read here only."""
        device = tokens.device
        counts = torch.tensor([piece.count for piece in pieces])
        starts = torch.tensor([piece.start for piece in pieces])
        ends = counts.cumsum(0)
        firsts = ends - counts
        slots = torch.repeat_interleave(torch.tensor([piece.slot for piece in pieces]), counts).to(device)
        offsets = torch.arange(int(ends[-1])) - torch.repeat_interleave(firsts, counts)
        positions = (offsets + torch.repeat_interleave(starts, counts)).to(device)
        size = cache.page_size

        self._cache = cache
        self._kv_rows = block_tables[slots, positions // size] * size + positions % size  # [T]
        self._spans = [
            Span(
                int(first),
                piece.start,
                piece.count,
                block_tables[piece.slot, : -(-(piece.start + piece.count) // size)],
            )
            for piece, first in zip(pieces, firsts.tolist(), strict=True)
        ]
        self.input_ids = tokens[slots, positions].long()[None]  # [1, T]
        self.position_ids = positions[None]  # [1, T]
        sampled = torch.tensor([piece.samples for piece in pieces])
        self.sampled_rows = (ends - 1)[sampled].to(device)  # [N]
        self.sampled_slots = slots[self.sampled_rows]  # [N]
        self.sampled_positions = positions[self.sampled_rows] + 1
        """Where the sampled tokens go in their sequences, [N]."""

    def attend(self, call: LayerCall) -> torch.Tensor:
        """Stores the step's keys and values, then attends each sequence over its own; [T, heads, value_dim]."""
        self._cache.write(call.layer, self._kv_rows, call.key, call.value)
        out = call.query.new_empty(*call.query.shape[:2], call.value.shape[2])
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


def logits_of(model: torch.nn.Module, step: PackedStep) -> torch.Tensor:
    """The model's logits at the rows that sample, [N, vocab]: its own forward, lm_head on those rows alone."""
    out = model(
        input_ids=step.input_ids,
        position_ids=step.position_ids,
        use_cache=False,
        logits_to_keep=step.sampled_rows,
        packed_step=step,
    )
    logits: torch.Tensor = out.logits[0]
    return logits
