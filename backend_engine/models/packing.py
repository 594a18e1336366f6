"""Weights of linear layers laid out once as oneDNN's kernels read them, for x86 CPUs.

torch.nn.Linear hands MKL a plain matrix, which every call works through as it lies. A matrix that was reordered before
serves all batch sizes faster (docs/engine.md has the figures). The plain copy is given up, so this costs no memory but
where a matrix has another user: a head that shares its weights with the embedding.
"""

from __future__ import annotations

import platform

import torch
import torch.nn.functional as F
from torch import nn

_X86 = ("x86_64", "AMD64")
_ROWS = 32
"""Batch size that the layout is asked for. From 1 to 1024 rows, none was better served by a layout of its own."""


def kernel_rows(rows: int) -> int:
    """The number of rows that a kernel is made for: at most an eighth more than asked for.

    oneDNN makes a kernel for every number of rows it meets and keeps it for good, some 600 kB each. Prompts come in all
    lengths, so without this the process would grow by gigabytes.
    """
    step = 1 << max(0, rows.bit_length() - 4)
    return -(-rows // step) * step


class PackedLinear(nn.Module):
    """Does what the nn.Linear did that it was made of."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.weight_bytes = linear.weight.nbytes
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _ROWS)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]."""
        count = rows.shape[:-1].numel()
        missing = kernel_rows(count) - count
        if not missing:
            whole: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self.bias, "none", [], "")
            return whole
        filled = F.pad(rows.reshape(count, -1), (0, 0, 0, missing))
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(filled, self._packed, self.bias, "none", [], "")
        return out[:count].view(*rows.shape[:-1], -1)


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this machine has kernels for packed weights of this type."""
    return (
        device.type == "cpu"
        and dtype == torch.float32
        and platform.machine() in _X86
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    )


def pack_linears(model: nn.Module) -> int:
    """Replaces the model's linear layers by packed ones; returns the bytes of weights that it holds then."""
    packed: dict[nn.Module, PackedLinear] = {}
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and not (child._forward_hooks or child._forward_pre_hooks):
                if child not in packed:
                    packed[child] = PackedLinear(child)
                    child.register_parameter("weight", None)  # not two copies of all weights while this runs
                setattr(module, name, packed[child])
    held = sum(module.weight_bytes for module in model.modules() if isinstance(module, PackedLinear))
    return held + sum(parameter.nbytes for parameter in model.parameters())
