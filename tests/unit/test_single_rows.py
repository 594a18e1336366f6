"""Attention that reads the paged cache where it lies gives what attention over gathered pages gives."""

from __future__ import annotations

import pytest
import torch

from backend_engine.devices.kv_cache import KvCache
from backend_engine.devices.single_rows import SingleRows, by_length
from backend_engine.models.attention import LayerCall, attend_one
from backend_engine.models.probe import LayerShape

PAGE_SIZE, KEY_DIM, VALUE_DIM = 4, 8, 6
LENGTHS = [1, 23, 9, 24, 4]


def cache_of(kv_heads: int, dtype: torch.dtype) -> KvCache:
    shape = LayerShape(kv_heads=kv_heads, key_dim=KEY_DIM, value_dim=VALUE_DIM, window=None)
    cache = KvCache([shape, shape], 60, PAGE_SIZE, 64, dtype, torch.device("cpu"))
    for tensor in (*cache.keys, *cache.values):
        tensor.normal_(generator=torch.Generator().manual_seed(3))
    return cache


def call_of(heads: int, kv_heads: int, dtype: torch.dtype, layer: int, rows: int, **how: float | None) -> LayerCall:
    chance = torch.Generator().manual_seed(layer)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=chance, dtype=dtype)

    return LayerCall(
        layer=layer,
        query=drawn(rows, heads, KEY_DIM),
        key=drawn(rows, kv_heads, KEY_DIM),
        value=drawn(rows, kv_heads, VALUE_DIM),
        **{"scaling": None, "window": None, "softcap": None} | how,  # type: ignore[arg-type]
    )


def gathered(call: LayerCall, cache: KvCache, tables: torch.Tensor, row: int, slot: int, length: int) -> torch.Tensor:
    keys, values = cache.gather(call.layer, tables[slot, : -(-length // PAGE_SIZE)])
    first = max(0, length - call.window) if call.window is not None else 0
    return attend_one(call, call.query[row : row + 1], keys[first:length], values[first:length])[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 4), (3, 1)])
@pytest.mark.parametrize(
    "how",
    [{}, {"scaling": 0.7}, {"window": 7}, {"softcap": 2.0}, {"window": 3, "softcap": 1.5, "scaling": 2.0}],
    ids=str,
)
def test_it_equals_attention_over_gathered_pages(
    heads: int, kv_heads: int, dtype: torch.dtype, how: dict[str, float]
) -> None:
    cache = cache_of(kv_heads, dtype)
    tables = torch.randperm(60, generator=torch.Generator().manual_seed(1)).view(10, 6).int()
    slots, rows = [7, 0, 3, 9, 4], [2, 3, 4, 6, 9]
    singles = SingleRows(rows, slots, LENGTHS, tables, cache)
    for layer in (0, 1, 0):  # the pattern and its scores are used again
        call = call_of(heads, kv_heads, dtype, layer, 11, **how)
        out = torch.full((11, heads, VALUE_DIM), 5.0, dtype=dtype)
        out[singles.rows] = singles.attend(call)
        for row, slot, length in zip(rows, slots, LENGTHS, strict=True):
            torch.testing.assert_close(out[row], gathered(call, cache, tables, row, slot, length))
        others = sorted(set(range(11)) - set(rows))
        assert (out[others] == 5.0).all()


def test_layers_of_several_kinds_in_one_step_do_not_disturb_each_other() -> None:
    cache = cache_of(2, torch.float32)
    tables = torch.arange(60).view(10, 6).int()
    singles = SingleRows([0, 1, 2, 3, 4], [0, 1, 2, 3, 4], LENGTHS, tables, cache)
    for layer, window in ((0, None), (1, 5), (0, None), (1, 5)):
        call = call_of(6, 2, torch.float32, layer, 5, window=window)
        out = torch.empty(5, 6, VALUE_DIM)
        out[singles.rows] = singles.attend(call)
        for row, length in enumerate(LENGTHS):
            torch.testing.assert_close(out[row], gathered(call, cache, tables, row, row, length))


def test_what_is_no_number_stays_in_its_own_sequence() -> None:
    """Neither through the padding of shorter sequences, nor through scores of the layer before, nor through pages that
    nobody owns."""
    cache = cache_of(2, torch.float32)
    tables = torch.arange(60).view(10, 6).int()
    for tensor in (*cache.keys, *cache.values):
        tensor[tables[1].long()] = float("nan")
        tensor[-1] = float("inf")
        tensor[tables[0, 1:].long()] = float("nan")  # a sequence of one token never looks there
    singles = SingleRows([0, 1, 2, 3, 4], [0, 1, 2, 3, 4], LENGTHS, tables, cache)
    for layer in (0, 1):
        out = torch.empty(5, 6, VALUE_DIM)
        out[singles.rows] = singles.attend(call_of(6, 2, torch.float32, layer, 5))
        assert torch.isfinite(out).flatten(1).all(dim=1).tolist() == [True, False, True, True, True]


def test_one_long_sequence_does_not_widen_the_pattern_of_the_short_ones() -> None:
    assert by_length([]) == []
    assert by_length([5, 60, 17]) == [[0, 1, 2]]
    assert by_length([5, 9000, 17, 8000]) == [[1, 3], [0, 2]]
    groups = by_length([8192] * 70)
    assert sorted(at for group in groups for at in group) == list(range(70))
    assert max(map(len, groups)) == 32
