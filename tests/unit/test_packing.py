"""Packed linear layers compute what they were made of, and a model's weights are counted once each."""

from __future__ import annotations

import pytest
import torch
import transformers
from engine_support import TINY_MODELS
from torch import nn

from backend_engine.models.packing import PackedLinear, can_pack, kernel_rows, pack_linears

pytestmark = pytest.mark.skipif(not can_pack(torch.float32, torch.device("cpu")), reason="no kernels for this machine")


def test_a_packed_model_gives_the_same_logits_whatever_the_number_of_rows() -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(TINY_MODELS["llama with grouped queries"]()).eval()
    linears = sum(type(module) is nn.Linear for module in model.modules())
    weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
    tokens = [torch.randint(0, 97, (1, count)) for count in (1, 5, 33, 201)]
    with torch.inference_mode():
        own = [model(given).logits for given in tokens]
        assert pack_linears(model) == weight_bytes
        for given, expected in zip(tokens, own, strict=True):
            torch.testing.assert_close(model(given).logits, expected)
    assert sum(isinstance(module, PackedLinear) for module in model.modules()) == linears > 20
    assert pack_linears(model) == weight_bytes  # nothing is left to pack


class Odd(nn.Module):
    """Biases, a layer used in two places, weights that an embedding has too, and a layer that somebody listens to."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.first = nn.Linear(8, 8)
        self.inner = nn.Sequential(self.first, nn.Linear(8, 8))
        self.heard = nn.Linear(8, 8)
        self.heard.register_forward_hook(lambda *_: None)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        rows = self.first(self.embedding(tokens))
        found: torch.Tensor = self.head(self.heard(self.inner(rows)))
        return found


def test_shared_layers_and_shared_weights_stay_what_they_are() -> None:
    torch.manual_seed(0)
    model, tokens = Odd().eval(), torch.tensor([[3, 11, 0]])
    with torch.inference_mode():
        expected = model(tokens)
        held = pack_linears(model)
        torch.testing.assert_close(model(tokens), expected)
    assert model.first is model.inner[0]
    assert type(model.heard) is nn.Linear
    square, table, biases = 8 * 8, 12 * 8, 3 * 8
    assert held == 4 * (3 * square + 2 * table + biases)  # the head's packed copy stands beside the embedding


def test_only_what_has_kernels_is_packed() -> None:
    assert not can_pack(torch.bfloat16, torch.device("cpu"))
    assert not can_pack(torch.float64, torch.device("cpu"))
    assert not can_pack(torch.float32, torch.device("cuda"))


def test_kernels_are_made_for_few_numbers_of_rows_none_much_larger_than_asked_for() -> None:
    sizes = {rows: kernel_rows(rows) for rows in range(1, 2049)}
    assert all(rows <= size <= rows + rows / 8 for rows, size in sizes.items())
    assert [sizes[rows] for rows in (1, 8, 15, 17, 32, 135, 2048)] == [1, 8, 15, 18, 32, 144, 2048]
    assert len(set(sizes.values())) < 80
