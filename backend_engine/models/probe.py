"""A forward of a few tokens before anything is allocated: it shows each layer's cache shape, and what is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from backend_engine.models.attention import LayerCall, UnsupportedAttention, attend_one
from backend_engine.models.errors import OTHER_ENGINE, ModelError

PROBE_TOKENS = 3


class LayerShape(msgspec.Struct, frozen=True):
    """What one layer keeps for each token."""

    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None
    softcap: float | None = None

    @property
    def numbers_per_token(self) -> int:
        """Of keys and values together."""
        return self.kv_heads * (self.key_dim + self.value_dim)


class Probe:
    """Attends over its own rows alone, and writes down what each layer brought."""

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}

    def attend(self, call: LayerCall) -> torch.Tensor:
        """Plain causal attention."""
        if call.layer in self.shapes:
            raise UnsupportedAttention(f"layer {call.layer} attends twice in one forward")
        kv_heads, key_dim = call.key.shape[1:]
        self.shapes[call.layer] = LayerShape(kv_heads, key_dim, call.value.shape[2], call.window, call.softcap)
        return attend_one(call, call.query, call.key, call.value)


def probe_layers(name: str, model: Any, layers: int) -> tuple[LayerShape, ...]:
    """Cache shape of each layer in order. Raises ModelError when a layer does not attend through the hook."""
    probe = Probe()
    device = model.get_input_embeddings().weight.device
    try:
        with torch.inference_mode():
            model(
                input_ids=torch.zeros(1, PROBE_TOKENS, dtype=torch.long, device=device),
                position_ids=torch.arange(PROBE_TOKENS, device=device)[None],
                use_cache=False,
                logits_to_keep=torch.tensor([PROBE_TOKENS - 1], device=device),
                packed_step=probe,
            )
        if sorted(probe.shapes) != list(range(layers)):
            raise UnsupportedAttention(
                f"{len(probe.shapes)} of its {layers} layers attend through the attention interface"
            )
        _check_windows(model.config, probe.shapes)
    except (UnsupportedAttention, TypeError) as error:
        raise ModelError(
            f"model {name!r} ({type(model).__name__}) is not supported: {error}; {OTHER_ENGINE}"
        ) from error
    return tuple(probe.shapes[layer] for layer in range(layers))


def _check_windows(config: Any, shapes: dict[int, LayerShape]) -> None:
    """A sliding-window layer must say its window to the hook, or it would see too much."""
    for layer, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if kind == "sliding_attention" and shapes[layer].window is None:
            raise UnsupportedAttention(f"layer {layer} has a sliding window that it does not pass to attention")
