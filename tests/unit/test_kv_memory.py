"""`tokenline config show` tells the KV cache's memory where it can be told without the model, and says what it is."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cli.kv_memory import kv_memory
from settings.schema import Settings

GIB = 2**30
NO_GPU: dict[str, int] = {}
ONE_GPU = {"0": 24 * GIB}

CASES: list[tuple[dict[str, Any], dict[str, Any], dict[str, int], int | None, bool, str]] = [
    ({"device": "cpu"}, {}, ONE_GPU, int(1.8 * GIB), False, "at most 1.80 GiB (1932735283 bytes), beside the weights"),
    ({"device": "cpu", "cpu_kv_cache_gib": 4}, {"kv_cache_ratio": 0.5}, NO_GPU, 2 * GIB, False, "on a CPU"),
    ({"device": "auto"}, {}, NO_GPU, int(1.8 * GIB), False, "unless torch finds a CUDA device"),
    (
        {"device": "auto"},
        {},
        ONE_GPU,
        int(21.6 * GIB),
        True,
        "before weights, of 24.00 GiB (25769803776 bytes) of GPU 0",
    ),
    ({"device": "cuda"}, {"kv_cache_ratio": 0.85}, ONE_GPU, int(20.4 * GIB), True, "before weights"),
    ({"device": "cuda"}, {}, NO_GPU, None, False, "known when the engine starts"),
    ({"device": "simulated"}, {}, NO_GPU, None, False, "simulated"),
    ({"backend": "vllm"}, {}, ONE_GPU, None, False, "sized by vLLM"),
]


@pytest.mark.parametrize(("engine", "model", "gpus", "size", "is_before_weights", "words"), CASES)
def test_the_bytes_and_what_they_mean(
    engine: dict[str, Any],
    model: dict[str, Any],
    gpus: dict[str, int],
    size: int | None,
    is_before_weights: bool,
    words: str,
) -> None:
    settings = Settings.model_validate({"state_dir": "/state", "engine": engine, "model": model})
    found = kv_memory(settings, lambda: gpus)
    assert found is not None
    assert (found.size, found.is_before_weights) == (size, is_before_weights)
    assert words in found.words


def test_without_an_engine_there_is_no_cache() -> None:
    assert kv_memory(Settings.model_validate({"state_dir": "/state", "engine": {"backend": "none"}})) is None


def test_config_show_prints_it(tokenline, monkeypatch) -> None:
    monkeypatch.setenv("TOKENLINE_ENGINE__DEVICE", "cpu")
    _, out, _ = tokenline("config", "show")
    assert "KV cache   at most 1.80 GiB (1932735283 bytes)" in out
    _, out, _ = tokenline("config", "show", "--json")
    found = json.loads(out)["kv_cache"]
    assert (found["bytes"], found["before_weights"]) == (1932735283, False)
