"""The paged KV cache: for each layer one tensor of keys and one of values, allocated once.

A token's row is `page * page_size + offset`, the same in every layer. Pages are addressed by block tables; what lies in
a page beyond a sequence's length is never read.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from backend_engine.models.probe import LayerShape


class KvCache:
    """Keys and values of `pages` pages; `keys[layer]` is [pages, page_size, kv_heads, key_dim]."""

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
        self.keys = [_zeros((pages, page_size, shape.kv_heads, shape.key_dim), dtype, device) for shape in layers]
        self.values = [_zeros((pages, page_size, shape.kv_heads, shape.value_dim), dtype, device) for shape in layers]
        most_pages = -(-longest_tokens // page_size)
        most_keys = max(shape.kv_heads * shape.key_dim for shape in layers)
        most_values = max(shape.kv_heads * shape.value_dim for shape in layers)
        self._key_space = torch.empty(most_pages * page_size * most_keys, dtype=dtype, device=device)
        self._value_space = torch.empty(most_pages * page_size * most_values, dtype=dtype, device=device)

    def write(self, layer: int, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Stores keys and values [T, kv_heads, dim] of a step's tokens at their rows [T]."""
        self.keys[layer].flatten(0, 1).index_copy_(0, rows, keys)
        self.values[layer].flatten(0, 1).index_copy_(0, rows, values)

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


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros. On a CPU the kernel hands out the memory page by page when it is first written, as calloc does: a large
    cache costs only what is used of it."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    count = int(np.prod(shape))
    return torch.from_numpy(np.zeros(count * dtype.itemsize, np.uint8)).view(dtype).view(shape)
