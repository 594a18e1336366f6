"""The two slot kernels, for the device at hand: `advance` after sampling, `gather_input` before the next forward."""

from __future__ import annotations

from collections.abc import Callable

import torch

from backend_engine.kernels import slot_torch
from backend_engine.kernels.slot_tensors import SlotTensors, StepInput

Advance = Callable[[SlotTensors, torch.Tensor, torch.Tensor], torch.Tensor]
GatherInput = Callable[[SlotTensors, torch.Tensor, torch.Tensor], StepInput]


def kernels_for(device: torch.device) -> tuple[Advance, GatherInput]:
    """Triton on CUDA, where every CUDA build of torch brings it; torch elsewhere."""
    if device.type == "cuda":
        from backend_engine.kernels import slot_triton

        return slot_triton.advance, slot_triton.gather_input
    return slot_torch.advance, slot_torch.gather_input
