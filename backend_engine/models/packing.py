"""Weights of linear layers laid out once as oneDNN's kernels read them, for x86 CPUs.

torch.nn.Linear hands MKL a plain matrix, which every call works through as it lies. A matrix that was reordered before
serves all batch sizes faster (docs/engine.md has the figures). The plain copy is given up, so this costs no memory but
where a matrix has another user: a head that shares its weights with the embedding.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

_multiply = torch.ops.mkldnn._linear_pointwise.default
_reorder = torch.ops.mkldnn._reorder_linear_weight.default
_X86 = ("x86_64", "AMD64")
_ROWS = 32
"""Batch size that the layout is asked for. From 1 to 1024 rows, none was better served by a layout of its own."""


def kernel_rows(rows: int) -> int:
    """The number of rows that a kernel is made for: at most an eighth more than asked for.

    oneDNN makes a kernel for every number of rows it meets and keeps it for good, some 600 kB each, and 3 MB above a
    thousand rows. Prompts come in all lengths, so without this the process would grow by gigabytes.
    """
    step = 1 << max(0, rows.bit_length() - 4)
    return -(-rows // step) * step


class Product(Protocol):
    """The product of rows with a matrix."""

    nbytes: int
    """Of weights that it holds itself."""

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]."""


class PlainProduct:
    """The outputs of linear layers side by side; their weights stay theirs."""

    nbytes = 0

    def __init__(self, *linears: nn.Linear) -> None:
        self._linears = linears

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features of all]."""
        outs = [F.linear(rows, linear.weight, linear.bias) for linear in self._linears]
        return outs[0] if len(outs) == 1 else torch.cat(outs, -1)


class PackedProduct:
    """The same as one product, of weights that are laid out; the linear layers are empty afterwards."""

    def __init__(self, *linears: nn.Linear) -> None:
        weights = [linear.weight.detach() for linear in linears]
        self._bias = _biases_of(linears)
        self._packed = _reorder(weights[0] if len(weights) == 1 else torch.cat(weights), _ROWS)
        self.nbytes = sum(weight.nbytes for weight in weights) + (0 if self._bias is None else self._bias.nbytes)
        for linear in linears:  # not two copies of all weights while a model is packed
            linear.register_parameter("weight", None)
            linear.register_parameter("bias", None)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features of all]."""
        count = rows.shape[:-1].numel()
        missing = kernel_rows(count) - count
        if not missing:
            whole: torch.Tensor = _multiply(rows, self._packed, self._bias, "none", [], "")
            return whole
        filled = F.pad(rows.reshape(count, -1), (0, 0, 0, missing))
        out: torch.Tensor = _multiply(filled, self._packed, self._bias, "none", [], "")
        return out[:count].view(*rows.shape[:-1], -1)


def _biases_of(linears: Sequence[nn.Linear]) -> torch.Tensor | None:
    """Of all of them, with zeros for one that has none; None when none has."""
    if all(linear.bias is None for linear in linears):
        return None
    biases = [
        linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias for linear in linears
    ]
    return torch.cat([bias.detach() for bias in biases])


class PackedLinear(nn.Module):
    """Does what the nn.Linear did that it was made of."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._product = PackedProduct(linear)
        self.nbytes = self._product.nbytes

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]."""
        return self._product(rows)


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
                setattr(module, name, packed[child])
    held = sum(module.nbytes for module in model.modules() if isinstance(module, PackedLinear))
    return held + sum(parameter.nbytes for parameter in model.parameters())
