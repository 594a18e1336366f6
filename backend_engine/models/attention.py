"""The attention hook: transformers' model code runs unchanged, and its attention layers call `attend` of a step.

Models look their attention function up by name in `AttentionInterface`; ours hands each layer's query, key and value to
the `packed_step` that was given to the model's forward as a keyword argument. No mask function is registered under our
name, and then transformers builds no mask at all: what may see what is the step's business.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec
import torch
import torch.nn.functional as F
from transformers import AttentionInterface

IMPLEMENTATION = "tokenline"

_OF_NO_EFFECT = frozenset(
    {
        *("position_ids", "position_embeddings", "cache_position", "cache", "past_key_values", "past_key_value"),
        *("use_cache", "is_causal", "output_attentions", "output_hidden_states", "output_router_logits", "dropout"),
        *("return_dict", "deterministic"),
    }
)
"""Arguments that models pass along and that change nothing in a causal attention over our own cache."""


class LayerCall(msgspec.Struct, frozen=True):
    """One layer's attention in one step. T rows of all sequences, packed."""

    layer: int
    query: torch.Tensor  # [T, heads, key_dim]
    key: torch.Tensor  # [T, kv_heads, key_dim]
    value: torch.Tensor  # [T, kv_heads, value_dim]
    scaling: float | None
    """Factor of query * key; None: 1 / sqrt(key_dim)."""
    window: int | None
    """A row sees this many last positions, its own included; None: all."""
    softcap: float | None
    """Scores are softcap * tanh(score / softcap); None: as they are."""


class AttendingStep(Protocol):
    """What the hook needs of a step."""

    def attend(self, call: LayerCall) -> torch.Tensor:
        """Attention of every row over its own sequence; [T, heads, value_dim]."""


class UnsupportedAttention(ValueError):
    """A layer asks for something that this hook does not do."""


def register_hook() -> None:
    """Makes `attn_implementation="tokenline"` known to transformers. Calling it again changes nothing."""
    AttentionInterface.register(IMPLEMENTATION, _hook)


def _hook(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, heads, T, key_dim]
    key: torch.Tensor,  # [1, kv_heads, T, key_dim]
    value: torch.Tensor,  # [1, kv_heads, T, value_dim]
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    packed_step: AttendingStep | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    if packed_step is None:
        raise UnsupportedAttention("its layers do not pass the forward's keyword arguments on to attention")
    asked = sorted(name for name, given in others.items() if given is not None and name not in _OF_NO_EFFECT)
    if asked:
        raise UnsupportedAttention(f"its attention asks for {', '.join(asked)}")
    if attention_mask is not None:
        raise UnsupportedAttention("it builds an attention mask of its own")
    if not getattr(module, "is_causal", True) or others.get("is_causal") is False:
        raise UnsupportedAttention("its attention is not causal")
    out = packed_step.attend(
        LayerCall(
            layer=module.layer_idx,  # type: ignore[arg-type]
            query=query[0].transpose(0, 1),
            key=key[0].transpose(0, 1),
            value=value[0].transpose(0, 1),
            scaling=scaling,
            window=sliding_window,
            softcap=softcap,
        )
    )
    return out.unsqueeze(0), None


def attend_one(
    call: LayerCall,
    query: torch.Tensor,  # [rows, heads, key_dim]
    key: torch.Tensor,  # [seen, kv_heads, key_dim]
    value: torch.Tensor,  # [seen, kv_heads, value_dim]
) -> torch.Tensor:
    """Attention of one sequence's last `rows` positions over its last `seen` ones; [rows, heads, value_dim].

    Heads that share a key and value head (grouped queries) are neighbours, as in transformers.
    """
    rows, heads, _ = query.shape
    seen, kv_heads, _ = key.shape
    if rows == 1 and call.softcap is None:
        # the group takes the place of the rows: no head is repeated, and one row that sees all needs no mask
        grouped = query.view(1, kv_heads, heads // kv_heads, -1)
        out = F.scaled_dot_product_attention(
            grouped, key.transpose(0, 1)[None], value.transpose(0, 1)[None], scale=call.scaling
        )
        return out.reshape(1, heads, -1)
    is_plain = rows == seen and (call.window is None or seen <= call.window)
    mask = None if is_plain else _mask(rows, seen, call.window, query.device)
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))  # [1, heads, positions, dim]
    if call.softcap is not None:
        return _attend_softcapped(call, q, k, v, mask if mask is not None else _mask(rows, seen, None, query.device))
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=is_plain, scale=call.scaling, enable_gqa=heads != kv_heads
    )
    return out[0].transpose(0, 1)


def _mask(rows: int, seen: int, window: int | None, device: torch.device) -> torch.Tensor:
    """True where a row may look; [rows, seen]. The last row is the sequence's last position."""
    row = torch.arange(seen - rows, seen, device=device)[:, None]
    column = torch.arange(seen, device=device)[None, :]
    allowed = column <= row
    return allowed if window is None else allowed & (column > row - window)


def _attend_softcapped(
    call: LayerCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """SDPA knows no soft-capping; this is the same written out, softmax in float32 or better as transformers does."""
    assert call.softcap is not None
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scaling = call.scaling if call.scaling is not None else q.shape[-1] ** -0.5
    scores = torch.tanh(q @ k.transpose(2, 3) * scaling / call.softcap) * call.softcap
    scores = scores.masked_fill(~mask, float("-inf"))
    precise = torch.promote_types(torch.float32, q.dtype)
    return (torch.softmax(scores, -1, dtype=precise).to(q.dtype) @ v)[0].transpose(0, 1)
