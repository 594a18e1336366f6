"""What does not fit into memory is told at the start, with the numbers and the settings to change."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from backend_engine.devices.fitting import (
    FitError,
    Memory,
    cgroup_left,
    check_weights,
    memory_of,
    pages_that_fit,
    start_errors_named,
)
from backend_engine.devices.sizing import GIB
from backend_engine.models.weights import count_weights
from settings.schema import Settings

BF16, F32 = torch.bfloat16, torch.float32


def settings_of(**sections: Any) -> Settings:
    engine = {"model": "org/model"} | sections.pop("engine", {})
    return Settings.model_validate({"state_dir": "/state", "engine": engine, **sections})


def cuda(total_gib: float, free_gib: float) -> Memory:
    return Memory("cuda", int(total_gib * GIB), int(free_gib * GIB))


def cpu(free_gib: float | None) -> Memory:
    return Memory("cpu", None, None if free_gib is None else int(free_gib * GIB))


WEIGHTS: list[tuple[Memory, float, torch.dtype, dict[str, Any], list[str] | None]] = [
    (cuda(24, 23.5), 15, BF16, {}, None),
    (cuda(24, 23.5), 28.1, BF16, {},
     ["'org/model' take 28.10 GiB in bfloat16", "engine.gpu_memory_utilization = 0.9",
      "21.60 GiB of the GPU's 24.00 GiB", 'engine.backend = "vllm"', "engine.tensor_parallel_size"]),
    (cuda(24, 23.5), 22, F32, {}, ["22.00 GiB in float32", 'engine.dtype = "bfloat16"']),
    (cuda(24, 23.5), 22, BF16, {"engine": {"gpu_memory_utilization": 0.95}}, None),
    (cuda(24, 6.1), 15, BF16, {}, ["6.10 GiB of the GPU's 24.00 GiB are free", "nvidia-smi"]),
    (cpu(5.1), 4.9, F32, {}, None),
    (cpu(5.1), 8, F32, {}, ["8.00 GiB in float32", "5.10 GiB of memory left", 'engine.dtype = "bfloat16"']),
    (cpu(5.1), 8, BF16, {}, ["8.00 GiB in bfloat16", "take a smaller model"]),
    (cpu(None), 1000, F32, {}, None),
]  # fmt: skip


@pytest.mark.parametrize(("memory", "weights_gib", "dtype", "sections", "words"), WEIGHTS)
def test_weights_that_do_not_fit_are_refused_before_they_are_loaded(
    memory: Memory, weights_gib: float, dtype: torch.dtype, sections: dict[str, Any], words: list[str] | None
) -> None:
    if words is None:
        check_weights(settings_of(**sections), int(weights_gib * GIB), dtype, memory)
        return
    with pytest.raises(FitError) as caught:
        check_weights(settings_of(**sections), int(weights_gib * GIB), dtype, memory)
    assert [word for word in words if word not in str(caught.value)] == []
    assert ('engine.dtype = "bfloat16"' in str(caught.value)) == (dtype is F32)


PER_TOKEN = 128 * 1024
"""Bytes; a sequence of 8192 tokens takes 1 GiB."""
CACHES: list[tuple[Memory, float, dict[str, Any], int | list[str]]] = [
    (cuda(24, 9), 15, {}, int(6.6 * 512)),
    (cuda(24, 9), 15, {"model": {"kv_cache_ratio": 0.5}}, int(4.5 * 512)),
    (cuda(24, 2), 15, {}, 2 * 512),  # less is free than the shares allow
    (cuda(24, 9), 15, {"scheduler": {"max_num_seqs": 2}}, 2 * 512),  # all that two slots can use
    (cuda(24, 9), 21, {},
     ["the KV cache gets 0.60 GiB", "a GPU with 24.00 GiB", "21.00 GiB of weights", "9.00 GiB free",
      "engine.gpu_memory_utilization = 0.9", "model.kv_cache_ratio = 1", "8192 tokens needs 1.00 GiB",
      "lower engine.max_model_len to 4912"]),
    (cuda(24, 9), 21.6, {}, ["gets 0.00 GiB", "or take a smaller model"]),
    (cpu(8), 2, {}, int(1.8 * 512)),
    (cpu(None), 2, {}, int(1.8 * 512)),
    (cpu(8), 2, {"engine": {"cpu_kv_cache_gib": 1}},
     ["gets 0.90 GiB", "engine.cpu_kv_cache_gib = 1", "Raise engine.cpu_kv_cache_gib",
      "lower engine.max_model_len to 7360"]),
    (cpu(1.5), 2, {},
     ["would take 1.80 GiB", "1.50 GiB of memory left", "2.00 GiB of weights", "engine.cpu_kv_cache_gib (now 2)",
      "less than 1.50", "scheduler.max_num_seqs"]),
]  # fmt: skip


@pytest.mark.parametrize(("memory", "weights_gib", "sections", "expected"), CACHES)
def test_the_cache_takes_what_is_left_or_says_what_takes_the_rest(
    memory: Memory, weights_gib: float, sections: dict[str, Any], expected: int | list[str]
) -> None:
    arguments = (settings_of(**sections), int(weights_gib * GIB), PER_TOKEN, 8192, memory)
    if isinstance(expected, int):
        assert pages_that_fit(*arguments) == pytest.approx(expected, abs=1)
        return
    with pytest.raises(FitError) as caught:
        pages_that_fit(*arguments)
    assert [word for word in expected if word not in str(caught.value)] == []


def test_the_length_that_is_advised_fits() -> None:
    settings = settings_of(engine={"cpu_kv_cache_gib": 1})
    assert pages_that_fit(settings, 0, PER_TOKEN, 7360, cpu(8)) == 460


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nAnd more."), MemoryError()]
)
def test_an_allocator_that_gives_up_at_the_start_names_the_settings_to_lower(error: Exception) -> None:
    with pytest.raises(FitError) as caught, start_errors_named(settings_of()):
        raise error
    said = str(caught.value)
    assert ("Tried to allocate 2 GiB." in said) or "MemoryError" in said
    assert "And more" not in said
    for key in ("engine.gpu_memory_utilization (now 0.9", "engine.cpu_kv_cache_gib", "max_model_len (now not set)"):
        assert key in said


def test_another_error_at_the_start_stays_what_it_is() -> None:
    with pytest.raises(RuntimeError, match="shapes"), start_errors_named(settings_of()):
        raise RuntimeError("shapes differ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_this_machine_tells_its_memory() -> None:
    found = memory_of(torch.device("cpu"))
    assert found.kind == "cpu"
    assert found.free is None or found.free > 2**20


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({"memory.max": "1000\n", "memory.current": "700", "memory.stat": "anon 500\ninactive_file 150\n"}, 450),
        ({"memory.max": "1000\n", "memory.current": "700", "memory.stat": ""}, 300),
        ({"memory.max": "max\n", "memory.current": "700", "memory.stat": ""}, None),
        ({"memory.max": "1000\n"}, None),
        ({}, None),
    ],
)
def test_a_containers_limit_counts(tmp_path: Path, files: dict[str, str], left: int | None) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert cgroup_left(tmp_path) == left


def test_weights_are_counted_by_the_headers_of_their_files(tmp_path: Path) -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "BF16", "shape": [3, 4], "data_offsets": [0, 24]},
        "b": {"dtype": "F32", "shape": [], "data_offsets": [24, 28]},
    }
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(28))
    assert count_weights("m", tmp_path) == 13
