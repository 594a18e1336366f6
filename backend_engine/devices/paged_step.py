"""One step whose attention reads keys and values where they lie in the paged cache: all sequences in one call a layer.

The kernel is torch's flash attention for sequences of various lengths. A block table tells it each sequence's pages, so
nothing is gathered and nothing is done for each sequence on the host. Its own conditions (see `why_not_paged`) are
those of FlashAttention 2, which torch brings. Unverified so far: no GPU was at hand; the tests hold what is handed to
the kernel against a kernel written out in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import msgspec
import numpy as np
import torch

from backend_engine.devices.kv_cache import KvCache
from backend_engine.devices.memory import to_device
from backend_engine.devices.packed_step import Piece, input_of, last_rows
from backend_engine.kernels.slot_tensors import StepInput
from backend_engine.models.attention import LayerCall
from backend_engine.models.probe import LayerShape

PAGE_MULTIPLE = 256
"""What FlashAttention 2 wants of a page's size when it is told a block table."""
MOST_HEAD_DIM = 256
LEAST_CAPABILITY = (8, 0)

Kernel = Callable[..., torch.Tensor]
"""Called as `varlen_attn` is."""


def flash_attention() -> Kernel:
    """torch's own. Raises ImportError from a torch before 2.10; one before 2.12 takes no block table (TypeError)."""
    from torch.nn.attention.varlen import varlen_attn

    return cast(Kernel, varlen_attn)


def why_not_paged(
    layers: Sequence[LayerShape], dtype: torch.dtype, page_size: int, capability: tuple[int, int] | None
) -> str | None:
    """Why attention can't read this cache in place; None when it can. `capability`: the GPU's; None: there is none."""
    if capability is None:
        return "there is no GPU"
    if capability < LEAST_CAPABILITY:
        return f"flash attention wants compute capability {LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]} or newer"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"flash attention wants bfloat16 or float16, not {str(dtype).removeprefix('torch.')}"
    if page_size % PAGE_MULTIPLE:
        return f"flash attention wants engine.page_size = {PAGE_MULTIPLE}, not {page_size}"
    for shape in layers:
        if shape.softcap is not None:
            return "it knows no soft-capping, which this model has"
        if shape.key_dim != shape.value_dim:
            return f"it wants keys as long as values, not {shape.key_dim} and {shape.value_dim}"
        if shape.key_dim > MOST_HEAD_DIM or shape.key_dim % 8:
            return f"it wants heads of up to {MOST_HEAD_DIM} numbers, in eights, not {shape.key_dim}"
    return None


class Sequences(msgspec.Struct, frozen=True):
    """Where the rows of N sequences lie in a step, and where their keys and values lie in the cache."""

    row_ends: torch.Tensor  # [N + 1] int32, 0 and then the rows up to the end of each sequence
    key_ends: torch.Tensor  # [N + 1] int32, the same of keys
    lengths: torch.Tensor  # [N] int32, how many keys there are of each: a sequence's last row sees them all
    block_table: torch.Tensor  # [N, pages] int32
    most_rows: int
    most_keys: int


def sequences_of(pieces: Sequence[Piece], block_tables: torch.Tensor, page_size: int) -> Sequences:
    """From what the host knows. `block_tables` [S, pages] is indexed by the pieces' slots."""
    device = block_tables.device
    counts = np.array([piece.count for piece in pieces], np.int32)
    lengths = np.array([piece.start + piece.count for piece in pieces], np.int32)
    numbers = np.zeros((3, len(pieces) + 1), np.int32)
    np.cumsum(counts, out=numbers[0, 1:])
    np.cumsum(lengths, out=numbers[1, 1:])
    numbers[2, 1:] = lengths
    row_ends, key_ends, padded_lengths = to_device(numbers, np.int32, device)  # in one copy
    slots = to_device([piece.slot for piece in pieces], np.int64, device)
    pages = -(-int(lengths.max()) // page_size)
    return Sequences(
        row_ends=row_ends,
        key_ends=key_ends,
        lengths=padded_lengths[1:],
        block_table=block_tables[:, :pages].index_select(0, slots).to(torch.int32),
        most_rows=int(counts.max()),
        most_keys=int(lengths.max()),
    )


def sequences_that_decode(
    slots: torch.Tensor, positions: torch.Tensor, block_tables: torch.Tensor, longest_tokens: int
) -> Sequences:
    """One row each, at `positions` [N] int64 of `slots` [N] int64, from what the device alone knows: nothing here asks
    the host, so it can be recorded once and replayed."""
    lengths = (positions + 1).to(torch.int32)
    none_before = torch.zeros(1, dtype=torch.int32, device=slots.device)
    return Sequences(
        row_ends=torch.arange(len(slots) + 1, dtype=torch.int32, device=slots.device),
        key_ends=torch.cat([none_before, lengths.cumsum(0, dtype=torch.int32)]),
        lengths=lengths,
        block_table=block_tables.index_select(0, slots),
        most_rows=1,
        most_keys=longest_tokens,
    )


class PagedStep:
    """T tokens of all sequences, as `PackedStep`, for a model on a GPU."""

    def __init__(
        self,
        given: StepInput,
        sequences: Sequences,
        sampled_rows: torch.Tensor,
        cache: KvCache,
        kernel: Kernel,
    ) -> None:
        self._cache = cache
        self._kv_rows = cache.kept_rows(given.kv_rows)  # [T]
        self._sequences = sequences
        self._kernel = kernel
        self.input_ids = given.ids[None]  # [1, T]
        self.position_ids = given.positions[None]  # [1, T]
        self.sampled_rows = sampled_rows  # [N]

    @classmethod
    def of(
        cls,
        pieces: Sequence[Piece],
        tokens: torch.Tensor,
        block_tables: torch.Tensor,
        cache: KvCache,
        kernel: Kernel,
    ) -> PagedStep:
        """A step of tokens that the host knows: `tokens` [S, longest], `block_tables` [S, pages]."""
        given = input_of(pieces, tokens, block_tables, cache.page_size)
        sequences = sequences_of(pieces, block_tables, cache.page_size)
        return cls(given, sequences, last_rows(pieces, tokens.device), cache, kernel)

    def attend(self, call: LayerCall) -> torch.Tensor:
        """Stores the step's keys and values, then attends each sequence over its own; [T, heads, value_dim]."""
        self._cache.write(call.layer, self._kv_rows, call.key, call.value)
        found = self._sequences
        return self._kernel(
            call.query,
            self._cache.keys[call.layer],
            self._cache.values[call.layer],
            found.row_ends,
            found.key_ends,
            found.most_rows,
            found.most_keys,
            scale=call.scaling,
            # (left, right): how many before and after itself a row sees
            window_size=(-1 if call.window is None else call.window - 1, 0),
            enable_gqa=call.query.shape[1] != call.key.shape[1],
            seqused_k=found.lengths,
            block_table=found.block_table,
        )
