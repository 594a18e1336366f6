"""The decoder of few operators gives what transformers' own code gives, or transformers' code runs the model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers
from engine_support import TINY_MODELS, VOCAB, settings_of
from torch import nn

from backend_engine.devices import model_choice
from backend_engine.devices.kv_cache import KvCache
from backend_engine.devices.model_choice import choose_model
from backend_engine.devices.packed_step import PackedStep, logits_of
from backend_engine.devices.selfcheck import SelfCheck
from backend_engine.models import lean
from backend_engine.models.lean import LeanDecoder, why_not_lean
from backend_engine.models.loading import LoadedModel, load_model
from backend_engine.models.packing import PackedProduct, PlainProduct, Product, can_pack

CPU = torch.device("cpu")
_TINY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
KNOWN: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**_TINY),
    "llama with a tied head and a head for each key": lambda: transformers.LlamaConfig(
        **_TINY | {"num_key_value_heads": 6}, tie_word_embeddings=True
    ),
    "llama with biases everywhere": lambda: transformers.LlamaConfig(**_TINY, attention_bias=True, mlp_bias=True),
    "llama 3 with its rotary scaling": lambda: transformers.LlamaConfig(**_TINY, rope_parameters=_LLAMA3_ROPE),
    "mistral with a sliding window": lambda: transformers.MistralConfig(**_TINY, sliding_window=7),
    "qwen2 with its biases": lambda: transformers.Qwen2Config(**_TINY),
    "qwen2 with its biases and windows in some layers": lambda: transformers.Qwen2Config(
        **_TINY, use_sliding_window=True, sliding_window=6, max_window_layers=1
    ),
    "qwen3 with norms of query and key, tied": lambda: transformers.Qwen3Config(
        **_TINY, use_sliding_window=True, sliding_window=6, max_window_layers=1, tie_word_embeddings=True
    ),
}


class Piece(msgspec.Struct, frozen=True):
    slot: int
    start: int
    count: int
    samples: bool = True


def write_model(folder: Path, kind: str, dtype: torch.dtype) -> Any:
    """Random weights: also norms and biases, which begin as ones and zeros."""
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config({**TINY_MODELS, **KNOWN}[kind](), dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.rand_like(parameter) - 0.5)
    model.save_pretrained(folder)
    return model


def load(folder: Path, dtype: torch.dtype) -> LoadedModel:
    name = str(dtype).removeprefix("torch.")
    return load_model(settings_of(engine={"model": str(folder), "device": "cpu", "dtype": name}), CPU)


STEPS = [
    [Piece(0, 0, 13, False), Piece(1, 0, 20, False)],  # prompts alone, in pieces
    [Piece(0, 13, 1), Piece(1, 20, 17), Piece(2, 0, 5)],  # one decodes, one goes on, one comes
    [Piece(2, 5, 1), Piece(0, 14, 1), Piece(1, 37, 1)],  # all decode
    [Piece(1, 38, 1)],
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("kind", KNOWN)
def test_it_equals_transformers_own_forward_in_prefill_decode_and_mixed_steps(
    kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    own_model = write_model(tmp_path, kind, dtype)
    loaded = load(tmp_path, dtype)
    assert why_not_lean(loaded.model) is None
    product = PackedProduct if can_pack(dtype, CPU) else PlainProduct
    decoder = LeanDecoder(loaded.model, loaded.layers, product)
    tokens = torch.randint(0, VOCAB, (3, 48), generator=torch.Generator().manual_seed(1))
    tables = torch.randperm(40, generator=torch.Generator().manual_seed(2))[:36].view(3, 12)
    cache = KvCache(loaded.layers, 40, 4, 48, dtype, CPU)
    tolerance = {torch.float64: 1e-5, torch.float32: 1e-3}[dtype]  # its norms are in float32 either way
    with torch.inference_mode():
        for step in STEPS:
            ours = logits_of(decoder, PackedStep.of(step, tokens, tables, cache))
            ends = [(piece.slot, piece.start + piece.count) for piece in step if piece.samples]
            assert ours.shape == (len(ends), VOCAB)
            for row, (slot, end) in enumerate(ends):
                own = own_model(input_ids=tokens[slot, None, :end], use_cache=False, logits_to_keep=1).logits[0, -1]
                torch.testing.assert_close(ours[row], own, atol=tolerance, rtol=tolerance)


def test_in_float64_a_model_is_not_refused_for_norms_and_a_softmax_in_float32(tmp_path: Path) -> None:
    write_model(tmp_path, "qwen2 with its biases", torch.float64)
    loaded = load(tmp_path, torch.float64)
    check = SelfCheck(loaded, CPU)
    for model in (loaded.model, LeanDecoder(loaded.model, loaded.layers, PlainProduct)):
        difference = check.compare_alone(model)
        assert difference is not None
        assert difference > 1e-6  # far above float64's own


@pytest.mark.parametrize("rows", [511, 512, 513, 1024, 1025])
def test_so_it_does_where_a_prompt_is_run_in_blocks(rows: int, tmp_path: Path) -> None:
    config = transformers.Qwen2Config(
        **_TINY | {"max_position_embeddings": 1100}, use_sliding_window=True, sliding_window=300, max_window_layers=1
    )
    torch.manual_seed(5)
    own_model = transformers.AutoModelForCausalLM.from_config(config).eval()
    own_model.save_pretrained(tmp_path)
    loaded = load(tmp_path, torch.float32)
    model, _ = choose_model(loaded, SelfCheck(loaded, CPU), CPU)
    assert isinstance(model, LeanDecoder)
    tokens = torch.randint(0, VOCAB, (3, 1100), generator=torch.Generator().manual_seed(rows))
    tables = torch.arange(3 * 69).view(3, 69)
    cache = KvCache(loaded.layers, 3 * 69, 16, 1100, torch.float32, CPU)
    with torch.inference_mode():
        logits_of(model, PackedStep.of([Piece(1, 0, 7)], tokens, tables, cache))
        # a row that decodes and a short prompt before the long one: block and sequence begin and end apart
        step = [Piece(1, 7, 1), Piece(2, 0, 5), Piece(0, 0, rows - 6)]
        ours = logits_of(model, PackedStep.of(step, tokens, tables, cache))
        for row, piece in enumerate(step):
            seen = tokens[piece.slot, None, : piece.start + piece.count]
            own = own_model(input_ids=seen, use_cache=False, logits_to_keep=1).logits[0, -1]
            torch.testing.assert_close(ours[row], own, atol=1e-3, rtol=1e-3)


@pytest.mark.skipif(not can_pack(torch.float32, CPU), reason="no kernels for this machine")
@pytest.mark.parametrize("kind", KNOWN)
def test_weights_are_held_once(kind: str, tmp_path: Path) -> None:
    write_model(tmp_path, kind, torch.float32)
    loaded = load(tmp_path, torch.float32)
    is_tied = loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
    table = loaded.model.model.embed_tokens.weight.nbytes
    model, held = choose_model(loaded, SelfCheck(loaded, CPU), CPU)
    assert isinstance(model, LeanDecoder)
    # a tied head's packed weights stand beside the embedding; a bias that others have is zeros where there is none
    assert held == loaded.weight_bytes + (table if is_tied else 0)
    left = {name for name, _ in loaded.model.named_parameters()}
    assert all("norm" in name or "embed_tokens" in name for name in left)
    assert sum(parameter.nbytes for parameter in loaded.model.parameters()) < held / 2


class Rejected(LeanDecoder):
    """Computes something else."""

    def logits(self, step: Any) -> torch.Tensor:
        return super().logits(step).flip(-1)


class Inexact(LeanDecoder):
    """Computes nearly that: a model is not refused for as much, but no rounding in float32 is so large."""

    def logits(self, step: Any) -> torch.Tensor:
        return super().logits(step) * 1.005


class FusedMlp(nn.Module):
    """The same MLP with other layers, as another release of transformers may have it."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(mlp.hidden_size, 2 * mlp.intermediate_size, bias=False)
        self.gate_up_proj.weight = nn.Parameter(torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)))
        self.down_proj = mlp.down_proj

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(rows).chunk(2, -1)
        found: torch.Tensor = self.down_proj(nn.functional.silu(gate) * up)
        return found


def test_a_known_architecture_with_other_layers_is_run_by_transformers_code(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_model(tmp_path, "llama", torch.float32)
    loaded = load(tmp_path, torch.float32)
    for layer in loaded.model.model.layers:
        layer.mlp = FusedMlp(layer.mlp)
    with caplog.at_level(logging.INFO, logger=model_choice.__name__):
        model, _ = choose_model(loaded, SelfCheck(loaded, CPU), CPU)
    assert model is loaded.model
    assert "has no attribute `gate_proj`" in caplog.text


def chosen(folder: Path, caplog: pytest.LogCaptureFixture) -> tuple[LoadedModel, Any]:
    loaded = load(folder, torch.float32)
    check = SelfCheck(loaded, CPU)
    with caplog.at_level(logging.INFO, logger=model_choice.__name__):
        model, _ = choose_model(loaded, check, CPU)
    cache = KvCache(loaded.layers, 40, 4, 48, torch.float32, CPU)
    assert check.compare(model, cache) < 1e-4
    return loaded, model


def test_an_architecture_that_it_does_not_know_is_run_by_transformers_code(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_model(tmp_path, "gemma2 with soft-capping and windows", torch.float32)
    loaded, model = chosen(tmp_path, caplog)
    assert model is loaded.model
    assert "run by transformers' own code" in caplog.text
    assert "Gemma2ForCausalLM is none of LlamaForCausalLM" in caplog.text


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda model: setattr(model.config, "hidden_act", "gelu"), "its activation is 'gelu'"),
        (lambda model: model.model.norm.register_forward_hook(lambda *_: None), "model.norm has hooks"),
        (
            lambda model: setattr(model.model.layers[1].mlp, "up_proj", nn.Sequential(nn.Linear(48, 40))),
            "mlp.up_proj of layer 1 is Sequential",
        ),
    ],
)
def test_a_known_architecture_with_another_part_is_told_apart(change: Any, says: str) -> None:
    model = transformers.AutoModelForCausalLM.from_config(KNOWN["llama"]())
    assert why_not_lean(model) is None
    change(model)
    assert says in (why_not_lean(model) or "")


def test_where_it_differs_or_breaks_transformers_code_runs_the_model_with_all_its_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path, "llama", torch.float32)

    def breaks(*_: Any) -> LeanDecoder:
        raise AttributeError("'LlamaAttention' object has no attribute 'q_proj'")

    for other, says in (
        (Rejected, "differs from transformers' own by"),
        (Inexact, "differs from it by 0.005, and 0.001 may be rounding"),
        (breaks, "has no attribute 'q_proj'"),
    ):
        caplog.clear()
        monkeypatch.setattr(model_choice, "LeanDecoder", other)
        loaded, model = chosen(tmp_path, caplog)
        assert model is loaded.model
        assert says in caplog.text
        assert "run by transformers' own code" in caplog.text


def test_what_a_gpu_runs_is_left_alone(tmp_path: Path) -> None:
    write_model(tmp_path, "llama", torch.float32)
    loaded = load(tmp_path, torch.float32)
    model, held = choose_model(loaded, SelfCheck(loaded, CPU), torch.device("cuda"))
    assert model is loaded.model
    assert held == loaded.weight_bytes


def test_a_layer_makes_four_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it is for: seven products were a layer's, and fifty operators."""
    model = transformers.AutoModelForCausalLM.from_config(KNOWN["llama"]()).eval()
    made: list[int] = []

    def product(*linears: nn.Linear) -> Product:
        made.append(len(linears))
        return PlainProduct(*linears)

    shape = lean.LayerShape(2, 8, 8, None)
    LeanDecoder(model, [shape] * 3, product)
    assert made == [3, 1, 2, 1] * 3 + [1]
