"""A model that can't be served ends `tokenline up` before it serves, with one line that says why and what to do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from line_rig import TOKENLINE, free_ports

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))  # the engine's own test rigs

from engine_support import write_tiny_model

from backend_engine.models import resolve

pytestmark = pytest.mark.e2e

LLAMA = "llama with grouped queries"


def whole(folder: Path) -> Path:
    write_tiny_model(folder, LLAMA)
    return folder


def changed(**fields: Any) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        config = json.loads((whole(folder) / "config.json").read_text()) | fields
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return make


def cut_weights(folder: Path) -> Path:
    weights = whole(folder) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    return folder


def cut_gguf(folder: Path) -> Path:
    packaged = resolve._packaged_gguf()
    assert packaged is not None
    cut = folder / "cut.gguf"
    cut.write_bytes(packaged.read_bytes()[:-1000])
    return cut


@pytest.mark.parametrize(
    ("make", "settings", "says"),
    [
        (changed(model_type="brand-new"), {}, ["brand-new", "upgrade transformers"]),
        (changed(num_attention_heads="four"), {}, ["config.json is not valid", "num_attention_heads"]),
        (changed(num_hidden_layers=9), {}, ["in none of its files", "Download the model again"]),
        (cut_weights, {}, ["is cut short", "download it again"]),
        (cut_gguf, {}, ["cut.gguf could not be read", "cut short (download it again)"]),
        (whole, {"engine__cpu_kv_cache_gib": "0.0000001"}, ["GiB", "engine.cpu_kv_cache_gib"]),
        (whole, {"engine__max_model_len": "4096"}, ["engine.max_model_len = 4096 is above the 256"]),
        (whole, {"engine__cpu_kv_cache_gib": "0.00005", "engine__max_model_len": "250"}, ["engine.max_model_len to "]),
        (whole, {"engine__tensor_parallel_size": "2"}, ['backend = "vllm"']),
    ],
)
def test_it_says_why_and_what_to_do(
    tmp_path: Path, make: Callable[[Path], Path], settings: dict[str, str], says: list[str]
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    tenant, ops, otlp = free_ports(3)
    environ = {
        **{key: value for key, value in os.environ.items() if not key.startswith(("TOKENLINE_", "OTEL_"))},
        "TOKENLINE_STATE_DIR": str(tmp_path / "state"),
        "TOKENLINE_CACHE_DIR": str(tmp_path / "cache"),
        "TOKENLINE_SERVER__PORT": str(tenant),
        "TOKENLINE_SERVER__OPS_PORT": str(ops),
        "TOKENLINE_SERVER__OTLP_PORT": str(otlp),
        **{f"TOKENLINE_{name.upper()}": value for name, value in settings.items()},
    }
    command = [TOKENLINE, "up", "--model", str(make(folder)), "--device", "cpu"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    said = done.stdout + done.stderr
    assert done.returncode not in (0, None), said
    assert "Traceback" not in said
    for part in says:
        assert part in " ".join(said.split()), said
    safetensors = list((tmp_path / "cache").rglob("*.safetensors"))
    assert not safetensors, "what was cut short was converted"
