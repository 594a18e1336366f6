"""The engine's greedy output is transformers' own, token for token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_support import TINY_MODELS, VOCAB, Driver, generated, prompts, settings_of, write_tiny_model

from backend_engine.devices import forwards
from backend_engine.devices.opening import open_device
from tracing.clock import SystemClock

LLAMA = "llama with grouped queries"
LENGTHS = (1, 2, 5, 9, 16, 17, 33, 40)
OUTPUTS = (1, 7, 20, 13, 30, 4, 18, 25)


def driver_of(folder: Path, dtype: str = "float32", **scheduler: Any) -> Driver:
    settings = settings_of(
        engine={"model": str(folder), "device": "cpu", "dtype": dtype, "page_size": 4},
        scheduler={"max_num_seqs": 5, "max_num_batched_tokens": 64, **scheduler},
    )
    clock = SystemClock()
    return Driver(open_device(settings, clock), settings, clock)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", TINY_MODELS)
def test_greedy_output_in_a_mixed_batch_with_small_chunks_equals_generate(
    kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = write_tiny_model(tmp_path, kind, dtype)
    driver = driver_of(tmp_path, str(dtype).removeprefix("torch."), max_num_batched_tokens=9)
    asked = dict(zip("abcdefgh", zip(prompts(LENGTHS), OUTPUTS, strict=True), strict=True))
    for turn, (name, (prompt, max_tokens)) in enumerate(asked.items()):
        driver.submit(name, prompt, max_tokens)
        for _ in range(turn % 3):
            driver.turn()
    driver.run()

    assert max(driver.scheduled(name).prefill_chunks for name in asked) > 3
    assert max(step.batch for step in driver.steps) == 5
    for name, (prompt, max_tokens) in asked.items():
        assert driver.tokens(name) == generated(model, prompt, max_tokens), name
    driver.assert_all_free()


@pytest.mark.parametrize("scheduler", [{"enable_chunked_prefill": False}, {"max_num_seqs": 1}, {}], ids=str)
def test_greedy_output_does_not_depend_on_how_steps_are_cut(scheduler: dict[str, Any], tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path, LLAMA)
    driver = driver_of(tmp_path, **scheduler)
    for name, prompt, max_tokens in zip("abcdefgh", prompts(LENGTHS), OUTPUTS, strict=True):
        driver.submit(name, prompt, max_tokens)
    driver.run()
    for name, prompt, max_tokens in zip("abcdefgh", prompts(LENGTHS), OUTPUTS, strict=True):
        assert driver.tokens(name) == generated(model, prompt, max_tokens), name


def test_a_stop_token_ends_a_request_and_is_its_last_token(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path, LLAMA)
    driver = driver_of(tmp_path)
    prompt = prompts([6])[0]
    expected = generated(model, prompt, 12)
    stop = expected[5]
    driver.submit("a", prompt, 12, stop_token_ids=(stop,))
    driver.run()
    assert driver.tokens("a") == expected[: expected.index(stop) + 1]
    assert driver.finished("a").reason == "stop"


def test_a_sequence_ends_at_the_models_length(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, LLAMA)
    driver = driver_of(tmp_path)
    driver.submit("a", prompts([250])[0], 100)
    driver.run()
    assert len(driver.tokens("a")) == 6
    assert driver.finished("a").reason == "length"


def test_seeded_output_is_the_same_alone_and_in_any_company(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, LLAMA)
    prompt = prompts([11])[0]
    how = {"temperature": 1.2, "seed": 42, "top_p": 0.95, "top_k": 40}

    alone = driver_of(tmp_path)
    alone.submit("it", prompt, 24, **how)
    alone.run()

    crowd = driver_of(tmp_path, max_num_batched_tokens=7)
    for name, other in zip("abcd", prompts([3, 8, 21, 5], seed=1), strict=True):
        crowd.submit(name, other, 15, temperature=0.7 if name < "c" else 0.0, seed=None if name == "a" else 5)
        crowd.turn()
        if name == "b":
            crowd.submit("it", prompt, 24, **how)
    crowd.run()

    assert crowd.tokens("it") == alone.tokens("it")
    other_seed = driver_of(tmp_path)
    other_seed.submit("it", prompt, 24, **{**how, "seed": 43})
    other_seed.run()
    assert other_seed.tokens("it") != alone.tokens("it")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "engine_out_of_memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to"), "engine_out_of_memory"),
        (RuntimeError("shapes differ"), "engine_error"),
    ],
    ids=str,
)
def test_out_of_memory_is_told_apart_and_the_engine_goes_on(
    error: Exception, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_model(tmp_path, LLAMA)
    driver = driver_of(tmp_path)

    def fail(*_: Any) -> torch.Tensor:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(forwards, "logits_of", fail)
        driver.submit("a", [5, 6], 4)
        driver.run()
    finished = driver.finished("a")
    assert (finished.reason, finished.error_code) == ("error", code)
    if code == "engine_out_of_memory":
        assert "1 sequences and 1 tokens" in (finished.error or "")
        assert "scheduler.max_num_batched_tokens" in (finished.error or "")
    driver.submit("b", [5, 6], 4)
    driver.run()
    assert driver.finished("b").reason == "length"
    driver.assert_all_free()


def test_a_request_that_fails_does_not_fail_its_batch(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path, LLAMA)
    poisoned = 90
    with torch.no_grad():
        model.get_input_embeddings().weight[poisoned] = float("nan")
    model.save_pretrained(tmp_path)
    driver = driver_of(tmp_path)
    healthy = [token for token in prompts([9])[0] if token != poisoned]
    driver.submit("not a token", [5, VOCAB], 4)
    driver.submit("poisoned", [5, poisoned, 6], 4)
    driver.submit("healthy", healthy, 4)
    driver.run()
    assert driver.finished("not a token").error_code == "invalid_prompt"
    assert str(VOCAB) in (driver.finished("not a token").error or "")
    assert driver.finished("poisoned").error_code == "engine_error"
    assert driver.finished("healthy").reason == "length"
    driver.submit("healthy in the poisoned one's pages", healthy, 4)
    driver.run()
    assert driver.tokens("healthy in the poisoned one's pages") == driver.tokens("healthy")
    driver.assert_all_free()
