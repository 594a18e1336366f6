"""What stands in for a GPU: flash attention over a block table written out in torch, a recorder that runs again."""

from __future__ import annotations

from collections.abc import Callable

import torch

from backend_engine.core.step import Device
from backend_engine.devices.decode_graphs import DecodeGraphs
from backend_engine.devices.forwards import PackedForward, PagedForward
from backend_engine.devices.torch_device import TorchDevice


def paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    """As torch's `varlen_attn`: query [T, heads, dim], key and value [pages, page_size, kv_heads, dim]. It checks
    what the kernel would read wrongly without a word."""
    assert cu_seq_k is not None
    assert seqused_k is not None
    assert block_table is not None
    count = len(seqused_k)
    for numbers, shape in ((cu_seq_q, (count + 1,)), (cu_seq_k, (count + 1,)), (seqused_k, (count,))):
        assert (numbers.dtype, numbers.shape, numbers.is_contiguous()) == (torch.int32, shape, True)
    assert (block_table.dtype, len(block_table), block_table.stride(-1)) == (torch.int32, count, 1)
    assert key.dim() == value.dim() == 4
    assert query.stride(-1) == 1
    assert int(cu_seq_q[-1]) == len(query)
    assert torch.equal(cu_seq_k.diff(), seqused_k)
    assert int(cu_seq_q.diff().max()) <= max_q
    assert int(seqused_k.max()) <= max_k
    assert window_size[1] == 0, "causal"
    assert enable_gqa == (query.shape[1] != key.shape[2])
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    groups = query.shape[1] // key.shape[2]
    out = torch.empty_like(query)
    for at, (first, end, seen) in enumerate(
        zip(cu_seq_q.tolist(), cu_seq_q.tolist()[1:], seqused_k.tolist(), strict=False)
    ):
        pages = block_table[at, : -(-seen // key.shape[1])].long()
        keys = key[pages].flatten(0, 1)[:seen].repeat_interleave(groups, 1)
        values = value[pages].flatten(0, 1)[:seen].repeat_interleave(groups, 1)
        rows = torch.arange(seen - (end - first), seen)[:, None]
        columns = torch.arange(seen)[None]
        is_seen = columns <= rows
        if window_size[0] >= 0:
            is_seen &= columns >= rows - window_size[0]
        scores = torch.einsum("qhd,khd->hqk", query[first:end], keys) * scale
        weights = scores.masked_fill(~is_seen, float("-inf")).softmax(-1)
        out[first:end] = torch.einsum("hqk,khd->qhd", weights, values)
    return out


class Rerun:
    """A recording: what ran once runs again, into the same place."""

    replays = 0

    def __init__(self, make: Callable[[], torch.Tensor]) -> None:
        self._make = make
        self.output = make().clone()

    def replay(self) -> None:
        self.output.copy_(self._make())
        Rerun.replays += 1


def on_paged_steps(device: Device, *, records: bool) -> TorchDevice:
    """The same device, as if it were a GPU."""
    assert isinstance(device, TorchDevice)
    forward = device._forward
    assert isinstance(forward, PackedForward)
    graphs = None
    if records:
        spare = len(device._rows.state.length) - 1
        with torch.inference_mode():
            graphs = DecodeGraphs(
                forward._model, device._rows, device._cache,
                spare_row=spare, longest_tokens=device.info.max_model_len, record=Rerun, kernel=paged_attention,
            )  # fmt: skip
    device._alive = lambda plan: list(plan.chunks)  # type: ignore[method-assign]  # nobody asks a GPU who is done
    device._forward = PagedForward(forward._model, device._rows, device._cache, paged_attention, graphs)
    return device
