"""Whether this engine can serve an architecture, told from its config before the weights are read.

Served: decoder-only transformers with full or sliding-window attention that goes through transformers' attention
interface. Others are refused by name.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM

from backend_engine.models.errors import OTHER_ENGINE, ModelError

_LAYER_TYPES = {"full_attention", "sliding_attention"}
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}
"""They change every position's angles with the longest position of the batch: one request would change another's."""


def read_config(name: str, folder: Path) -> Any:
    """The model's config (a PretrainedConfig), if this engine can serve it."""
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, KeyError, OSError) as error:
        raise ModelError(
            f"model {name!r}: transformers does not know its architecture ({str(error).splitlines()[0]}); "
            f"upgrade transformers, or {OTHER_ENGINE}"
        ) from error
    except StrictDataclassError as error:
        said = " ".join(str(error).split())
        raise ModelError(f"model {name!r}: its config.json is not valid ({said}); download it again") from error
    _check_kind(name, config)
    _check_layers(name, config)
    return config


def max_model_len(name: str, config: Any, asked: int | None) -> int:
    """Tokens of prompt and answer: what was asked for, within what the model was made for."""
    own: int | None = getattr(config, "max_position_embeddings", None)
    if own is None and asked is None:
        raise ModelError(f"model {name!r} does not say how long its sequences may be; set engine.max_model_len")
    if own is not None and asked is not None and asked > own:
        raise ModelError(
            f"engine.max_model_len = {asked} is above the {own} tokens that model {name!r} was made for; "
            f"set it to {own} or less"
        )
    chosen = asked or own
    assert chosen is not None
    _check_rope(name, config, chosen)
    return chosen


def _refuse(name: str, config: Any, kind: str) -> ModelError:
    architecture = ", ".join(getattr(config, "architectures", None) or [config.model_type])
    return ModelError(
        f"model {name!r} ({architecture}) {kind}, and this engine serves decoder-only text models: {OTHER_ENGINE}"
    )


def _check_kind(name: str, config: Any) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise _refuse(name, config, "is an encoder-decoder model")
    for part in ("vision_config", "audio_config"):
        if getattr(config, part, None) is not None:
            raise _refuse(name, config, f"has a {part.removesuffix('_config')} part")
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization.quant_method
        raise ModelError(
            f"model {name!r} is quantised with {method}, and this engine runs plain floating-point weights: use "
            f"the unquantised model, or {OTHER_ENGINE}"
        )
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise _refuse(name, config, "is not a causal language model")


def _check_layers(name: str, config: Any) -> None:
    for kind in getattr(config, "layer_types", None) or ():
        if kind not in _LAYER_TYPES:
            raise _refuse(name, config, f"has {kind} layers (state-space, recurrent or chunked)")
    model_class = AutoModelForCausalLM._model_mapping[type(config)]
    if not getattr(model_class, "_supports_attention_backend", False):
        raise _refuse(name, config, "does not compute attention through transformers' attention interface")
    if "logits_to_keep" not in inspect.signature(model_class.forward).parameters:
        raise _refuse(name, config, "cannot compute logits for chosen rows alone (no logits_to_keep)")


def _check_rope(name: str, config: Any, length: int) -> None:
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        kind = parameters.get("rope_type")
        if kind not in _LENGTH_DEPENDENT_ROPE:
            continue
        safe = int(parameters.get("original_max_position_embeddings") or config.max_position_embeddings)
        if length > safe:
            raise ModelError(
                f"model {name!r} uses {kind} rotary embeddings, whose angles change beyond {safe} tokens for the whole "
                f"batch at once: set engine.max_model_len to {safe} or less, or {OTHER_ENGINE}"
            )
