"""The paged KV cache: for each layer one tensor of keys and one of values, allocated once.

A token's row is `page * page_size + offset`, the same in every layer. Pages are addressed by block tables; what lies in
a page beyond a sequence's length is never read. One page more than can be owned takes what is not to be kept: rows of
sequences that ended in a step before, and were in this one already.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from backend_engine.devices.memory import lazy_zeros
from backend_engine.models.probe import LayerShape


class KvCache:
    """Keys and values of `pages` pages; `keys[layer]` is [pages + 1, page_size, kv_heads, key_dim]."""

    def __init__(
        self,
        layers: Sequence[LayerShape],
        pages: int,
        page_size: int,
        longest_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`longest_tokens`: of one sequence; the workspace that pages are gathered into holds that many."""
        self.page_size = page_size
        self.pages = pages
        self.keys = [
            lazy_zeros((pages + 1, page_size, shape.kv_heads, shape.key_dim), dtype, device) for shape in layers
        ]
        self.values = [
            lazy_zeros((pages + 1, page_size, shape.kv_heads, shape.value_dim), dtype, device) for shape in layers
        ]
        # the same memory, one row for each token; made once, since views cost each layer of a decode step microseconds
        self._key_rows = [keys.flatten(0, 1) for keys in self.keys]
        self._value_rows = [values.flatten(0, 1) for values in self.values]
        most_pages = -(-longest_tokens // page_size)
        most_keys = max(shape.kv_heads * shape.key_dim for shape in layers)
        most_values = max(shape.kv_heads * shape.value_dim for shape in layers)
        self._key_space = torch.empty(most_pages * page_size * most_keys, dtype=dtype, device=device)
        self._value_space = torch.empty(most_pages * page_size * most_values, dtype=dtype, device=device)

    def kept_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """The same rows, with those that go nowhere (below 0) in the page that nobody owns."""
        return rows.masked_fill(rows < 0, self.pages * self.page_size)

    def write(self, layer: int, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Stores keys and values [T, kv_heads, dim] of a step's tokens at their rows [T]."""
        self._key_rows[layer].index_copy_(0, rows, keys)
        self._value_rows[layer].index_copy_(0, rows, values)

    def gather(self, layer: int, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of these pages in order, [pages * page_size, kv_heads, dim]: valid until the next call."""
        return (
            _gather(self.keys[layer], pages, self._key_space),
            _gather(self.values[layer], pages, self._value_space),
        )


def _gather(cache: torch.Tensor, pages: torch.Tensor, space: torch.Tensor) -> torch.Tensor:
    shape = (len(pages), *cache.shape[1:])
    out = space[: len(pages) * cache[0].numel()].view(shape)
    return torch.index_select(cache, 0, pages, out=out).flatten(0, 1)
