"""What runs a model's steps on a CPU: our decoder of few operators where it gives what transformers' own code gives."""

from __future__ import annotations

import logging

import torch

from backend_engine.devices.memory import is_memory_error
from backend_engine.devices.packed_step import Model
from backend_engine.devices.selfcheck import SelfCheck
from backend_engine.models.errors import ModelError
from backend_engine.models.lean import LeanDecoder, why_not_lean
from backend_engine.models.loading import LoadedModel
from backend_engine.models.packing import PackedProduct, PlainProduct, can_pack, pack_linears

log = logging.getLogger(__name__)

TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.03}
"""Most that our decoder may differ by: a small part of what a model is refused for, since it can be done without. At
SmolLM2-135M it differs by 2e-7, 4e-7, 7e-3 and 7e-4; another activation in bfloat16 gives 0.1 to 0.2."""


def choose_model(loaded: LoadedModel, check: SelfCheck, device: torch.device) -> tuple[Model, int]:
    """What to run, and the bytes of its weights. Weights are laid out where this machine has kernels for that; then
    `loaded.model` holds them no longer."""
    if device.type != "cpu":
        return loaded.model, loaded.weight_bytes
    packs = can_pack(loaded.dtype, device)
    why_not = _why_not_lean(loaded, check)
    if why_not is None:
        lean = LeanDecoder(loaded.model, loaded.layers, PackedProduct if packs else PlainProduct)
        return lean, lean.weight_bytes
    log.info("the model is run by transformers' own code, which is slower on a CPU: %s", why_not)
    return loaded.model, pack_linears(loaded.model) if packs else loaded.weight_bytes


def _why_not_lean(loaded: LoadedModel, check: SelfCheck) -> str | None:
    """Run on the weights as they were loaded: they are still there for transformers' code when it differs."""
    try:
        if unknown := why_not_lean(loaded.model):
            return unknown
        difference = check.compare_alone(LeanDecoder(loaded.model, loaded.layers, PlainProduct))
    except (AttributeError, RuntimeError, TypeError, ModelError) as error:  # whatever a model of that name has not got
        if is_memory_error(error):
            raise
        return f"the other decoder failed its check ({(str(error).splitlines() or [type(error).__name__])[0]})"
    if difference is None:
        return "sequences are too short to check the other decoder with"
    if difference > TOLERANCE[loaded.dtype]:
        return f"the other decoder differs from it by {difference:.2g}, and {TOLERANCE[loaded.dtype]:g} may be rounding"
    return None
