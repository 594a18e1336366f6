"""A decoder's forward in few operators, for architectures that it computes exactly as transformers does.

transformers runs a layer as some fifty operators, each a call through Python; one row's products take little longer
than they do. Here the weights of a loaded model are run with a third of that: one product for query, key and value, one
for gate and up, norms in one call, query and key turned together, sums in place. transformers stays the loader and
the reference: an architecture is known here by its class, and nothing is served that was not compared with its own
forward first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from backend_engine.models.attention import LayerCall
from backend_engine.models.packing import Product, kernel_rows
from backend_engine.models.probe import LayerShape

ARCHITECTURES = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
"""RMS norms before attention and MLP, rotary halves, a gated SiLU MLP; biases, and norms of query and key, if any."""
_LINEARS = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)
_SILU = ("silu", "swish")

BLOCK_ROWS = 512

ProductOf = Callable[..., Product]
"""Makes one product of linear layers (nn.Linear) that read the same rows."""


class RunnableStep(Protocol):
    """A step that a model can be run on."""

    input_ids: torch.Tensor  # [1, T]
    position_ids: torch.Tensor  # [1, T]
    sampled_rows: torch.Tensor  # [N]

    def attend(self, call: LayerCall) -> torch.Tensor: ...


def why_not_lean(model: nn.Module) -> str | None:
    """Why this decoder does not know a transformers model; None when it does."""
    name = type(model).__name__
    if name not in ARCHITECTURES or not type(model).__module__.startswith("transformers.models."):
        return f"{name} is none of {', '.join(sorted(ARCHITECTURES))}"
    act = model.config.hidden_act  # type: ignore[union-attr]
    if act not in _SILU:
        return f"its activation is {act!r}"
    for path, module in model.named_modules():
        if module._forward_hooks or module._forward_pre_hooks:
            return f"{path or name} has hooks"
    linears = {"lm_head": model.lm_head}
    for number, layer in enumerate(model.model.layers):  # type: ignore[union-attr, arg-type]
        linears |= {f"{path} of layer {number}": layer.get_submodule(path) for path in _LINEARS}
    odd = next((path for path, linear in linears.items() if type(linear) is not nn.Linear), None)
    return None if odd is None else f"{odd} is {type(linears[odd]).__name__}, no plain linear layer"


class LeanDecoder:
    """Runs the weights of a transformers model. `product` decides how linear layers are held and multiplied."""

    def __init__(self, model: Any, layers: Sequence[LayerShape], product: ProductOf) -> None:
        """`layers` as they were probed: a window is theirs alone."""
        decoder = model.model
        self._embedding = decoder.embed_tokens.weight
        self._rotary = decoder.rotary_emb
        self._layers = [
            _Layer(layer, number, shape, product)
            for number, (layer, shape) in enumerate(zip(decoder.layers, layers, strict=True))
        ]
        self._norm = _Norm(decoder.norm)
        self._head = product(model.lm_head)
        products = [self._head, *(each for layer in self._layers for each in layer.products)]
        self.weight_bytes = sum(each.nbytes for each in products) + sum(each.nbytes for each in model.parameters())

    def logits(self, step: RunnableStep) -> torch.Tensor:
        """At the rows that sample, [N, vocab]."""
        hidden = F.embedding(step.input_ids[0], self._embedding)  # [T, hidden], summed into in place
        blocks = blocks_of(hidden)
        turn = _Turn(*self._rotary(hidden[None], step.position_ids))
        for layer in self._layers:
            layer.run(blocks, turn, step)
        return self._head(self._norm(hidden[step.sampled_rows]))


def blocks_of(rows: torch.Tensor) -> Sequence[torch.Tensor]:
    """Views of a step's rows [T, ...], at most BLOCK_ROWS each and of about one size: what a block's products bring
    stays in the cache for what comes after them, and no kernel is made for a thousand rows."""
    count = -(-len(rows) // BLOCK_ROWS)
    return (rows,) if count <= 1 else torch.split(rows, kernel_rows(-(-len(rows) // count)))


def _together(blocks: Sequence[torch.Tensor]) -> torch.Tensor:
    return blocks[0] if len(blocks) == 1 else torch.cat(list(blocks))


class _Norm:
    """An RMS norm. transformers computes it in float32, whatever the type of the rows.

    torch's own rms_norm is ten operators on a CPU, and in a decode step each costs some 4 us: 1.3 ms for the 61 norms
    of a model of 30 layers.
    """

    def __init__(self, norm: Any) -> None:
        self._weight: torch.Tensor = norm.weight
        self._share = 1 / len(norm.weight)
        self._eps = torch.tensor(norm.variance_epsilon, device=norm.weight.device)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Over the last dimension."""
        if rows.dtype != torch.float32:
            return self._scaled(rows.float()).to(rows.dtype).mul_(self._weight)
        return self._scaled(rows).mul_(self._weight)

    def _scaled(self, rows: torch.Tensor) -> torch.Tensor:
        length = torch.linalg.vector_norm(rows, 2, -1, True)
        scale = torch.addcmul(self._eps, length, length, value=self._share).rsqrt_()  # 1 / sqrt(mean square + eps)
        return torch.mul(rows, scale)


class _Turn:
    """Rotary positions of a step's rows: a * cos + rotated(a) * sin, where rotated([x, y]) = [-y, x] by halves."""

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Both [1, T, head_dim]."""
        self._half = cos.shape[-1] // 2
        self._cos = cos[0, :, None]
        self._sin = torch.cat((sin[0, :, None, : self._half].neg(), sin[0, :, None, self._half :]), -1)  # [T, 1, dim]

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        """[T, heads, head_dim]."""
        return torch.mul(heads, self._cos).addcmul_(heads.roll(self._half, -1), self._sin)


class _Layer:
    def __init__(self, layer: Any, number: int, shape: LayerShape, product: ProductOf) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._number = number
        self._window = shape.window
        self._scaling: float = attention.scaling
        self._head_dim: int = attention.head_dim
        self._heads = attention.q_proj.out_features // self._head_dim
        self._turned = self._heads + shape.kv_heads  # query and key heads lie side by side
        self._norm, self._mlp_norm = _Norm(layer.input_layernorm), _Norm(layer.post_attention_layernorm)
        self._query_norm = _Norm(attention.q_norm) if hasattr(attention, "q_norm") else None
        self._key_norm = _Norm(attention.k_norm) if hasattr(attention, "k_norm") else None
        self._query_key_value = product(attention.q_proj, attention.k_proj, attention.v_proj)
        self._out = product(attention.o_proj)
        self._gate_up = product(mlp.gate_proj, mlp.up_proj)
        self._down = product(mlp.down_proj)
        self.products = (self._query_key_value, self._out, self._gate_up, self._down)

    def run(self, blocks: Sequence[torch.Tensor], turn: _Turn, step: RunnableStep) -> None:
        """Adds what the layer brings to `blocks`, which are the step's rows [T, hidden]."""
        every = _together([self._query_key_value(self._norm(block)) for block in blocks])
        every = every.view(len(every), -1, self._head_dim)
        query_key = turn(self._normed(every[:, : self._turned]))
        call = LayerCall(
            layer=self._number,
            query=query_key[:, : self._heads],
            key=query_key[:, self._heads :],
            value=every[:, self._turned :],
            scaling=self._scaling,
            window=self._window,
            softcap=None,
        )
        for block, attended in zip(blocks, blocks_of(step.attend(call).flatten(1)), strict=True):
            block += self._out(attended)
            gate, up = self._gate_up(self._mlp_norm(block)).chunk(2, 1)
            block += self._down(F.silu(gate).mul_(up))

    def _normed(self, query_key: torch.Tensor) -> torch.Tensor:
        if self._query_norm is None or self._key_norm is None:
            return query_key
        query, key = query_key[:, : self._heads], query_key[:, self._heads :]
        return torch.cat((self._query_norm(query), self._key_norm(key)), 1)
