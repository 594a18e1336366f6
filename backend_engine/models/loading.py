"""Loads a model for the engine: weights in the right type on the right device, under our attention hook."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging as transformers_logging

from backend_engine.devices.fitting import check_weights, memory_of
from backend_engine.models.attention import IMPLEMENTATION, register_hook
from backend_engine.models.errors import ModelError
from backend_engine.models.probe import LayerShape, probe_layers
from backend_engine.models.resolve import resolve_model
from backend_engine.models.support import max_model_len, read_config
from backend_engine.models.weights import count_weights
from settings.schema import Settings


class LoadedModel(msgspec.Struct, frozen=True):
    """A model on its device, and what the engine needs to know of it."""

    name: str
    model: Any
    """A transformers causal language model in eval mode."""
    layers: tuple[LayerShape, ...]
    dtype: torch.dtype
    max_model_len: int
    vocab_size: int
    weight_bytes: int
    eos_token_ids: tuple[int, ...]

    @property
    def kv_bytes_per_token(self) -> int:
        """Of all layers."""
        return sum(layer.numbers_per_token for layer in self.layers) * self.dtype.itemsize


def load_model(settings: Settings, device: torch.device) -> LoadedModel:
    """Loads `engine.model`. Raises ModelError or FitError, which name the model and the fix."""
    engine, name = settings.engine, settings.engine.model
    folder = resolve_model(name).folder
    config = read_config(name, folder)
    length = max_model_len(name, config, engine.max_model_len)
    dtype = _dtype(engine.dtype, config, device)
    check_weights(settings, count_weights(name, folder) * dtype.itemsize, dtype, memory_of(device))
    register_hook()
    transformers_logging.disable_progress_bar()  # this process logs to a file or a supervisor
    model = _load_weights(name, folder, config, dtype)
    model.eval().to(device)
    return LoadedModel(
        name=name,
        model=model,
        layers=probe_layers(name, model, config.num_hidden_layers),
        dtype=dtype,
        max_model_len=length,
        vocab_size=model.get_input_embeddings().weight.shape[0],
        weight_bytes=sum(tensor.nbytes for tensor in model.parameters()),
        eos_token_ids=_eos_token_ids(folder, config),
    )


def _load_weights(name: str, folder: Path, config: Any, dtype: torch.dtype) -> Any:
    try:
        model, told = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=IMPLEMENTATION,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, with their names
        )
    except (OSError, ValueError) as error:
        raise ModelError(f"model {name!r} could not be loaded from {folder}: {error}") from error
    # transformers goes on with random numbers in the place of what it does not find
    faults = [f"{key} is in none of its files" for key in sorted(told["missing_keys"])]
    faults += [
        f"{key} is {list(there)} and not {list(wanted)}" for key, there, wanted in sorted(told["mismatched_keys"])
    ]
    if faults:
        raise ModelError(
            f"model {name!r}: its weights in {folder} are not those that its config.json asks for: {faults[0]}"
            f"{f', and {len(faults) - 1} more' if len(faults) > 1 else ''}. Download the model again, whole"
        )
    return model


def _dtype(asked: str, config: Any, device: torch.device) -> torch.dtype:
    if asked != "auto":
        chosen = getattr(torch, asked)
    elif device.type == "cpu":
        chosen = torch.float32
    else:
        chosen = getattr(config, "dtype", None) or torch.bfloat16
    assert isinstance(chosen, torch.dtype)
    if device.type == "cuda" and chosen == torch.bfloat16 and not torch.cuda.is_bf16_supported():
        raise ModelError("this GPU has no bfloat16: set engine.dtype to float16 or float32")
    return chosen


def _eos_token_ids(folder: Path, config: Any) -> tuple[int, ...]:
    """End tokens: those of generation_config.json, which instruction-tuned models use, else the config's."""
    found = config.eos_token_id
    if (folder / "generation_config.json").is_file():
        found = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id or found
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list) else (int(found),)
