"""The demo model: our packed, paged forward agrees with transformers' own, and an answer reads as English."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from backend_engine.core.forward import InlineForward
from backend_engine.core.loop import EngineCore
from backend_engine.core.messages import Sampling, Submit
from backend_engine.devices.kv_cache import KvCache
from backend_engine.devices.model_choice import choose_model
from backend_engine.devices.packed_step import PackedStep, logits_of
from backend_engine.devices.selfcheck import SelfCheck, _Piece
from backend_engine.devices.torch_device import TorchDevice
from backend_engine.models.lean import LeanDecoder
from backend_engine.models.loading import LoadedModel, load_model
from backend_engine.models.resolve import resolve_model
from settings.schema import Settings
from tracing.clock import SystemClock

pytestmark = pytest.mark.real_model

TOLERANCE = 1e-3
"""Largest absolute difference of two logits in float32; they span about 70. Measured: 6e-5."""

TEXT = (
    "The quick brown fox jumps over the lazy dog. 素早い茶色の狐が犬を飛び越える。 def f(x): return x ** 2  # 🦊\n" * 4
)


@pytest.fixture(scope="module")
def settings() -> Settings:
    return Settings.model_validate({"state_dir": "/nowhere", "engine": {"device": "cpu", "max_model_len": 1024}})


@pytest.fixture
def loaded(settings: Settings) -> LoadedModel:
    """For each test: a model whose weights were laid out holds them no longer."""
    return load_model(settings, torch.device("cpu"))


def test_teacher_forced_logits_agree_with_transformers_own_forward(loaded: LoadedModel) -> None:
    folder = resolve_model(loaded.name).folder
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor(tokenizer(TEXT)["input_ids"])[:175]
    assert len(ids) == 175
    own_model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        own = own_model(input_ids=ids[None]).logits[0]
    model, _ = choose_model(loaded, SelfCheck(loaded, torch.device("cpu")), torch.device("cpu"))
    assert isinstance(model, LeanDecoder)

    # the text twice in one row, on scattered pages: in chunks of 50, then token by token
    cache = KvCache(loaded.layers, 64, 16, 512, loaded.dtype, torch.device("cpu"))
    tokens = torch.stack([ids, ids])
    tables = torch.randperm(64, generator=torch.Generator().manual_seed(0)).view(2, 32)
    cuts = [0, 50, 100, 150, *range(151, len(ids) + 1)]
    worst = 0.0
    with torch.inference_mode():
        for begin, end in pairwise(cuts):
            pieces = [_Piece(slot, begin, end - begin, True) for slot in (0, 1)]
            logits = logits_of(model, PackedStep.of(pieces, tokens, tables, cache))
            worst = max(worst, float((logits - own[end - 1]).abs().max()))
    assert worst < TOLERANCE


def test_an_answer_through_the_engine_is_sensible_english(loaded: LoadedModel, settings: Settings) -> None:
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(loaded.name).folder)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    clock = SystemClock()
    device = TorchDevice(loaded, settings, clock, torch.device("cpu"))
    core = EngineCore(InlineForward(device), settings, clock, draw_seed=lambda: 0)
    how = Sampling(max_tokens=24, temperature=0.0, stop_token_ids=device.info.eos_token_ids)
    core.take(Submit("a", list(prompt), how, clock.mono_ns()))
    answer: list[int] = []
    reason = None
    while reason is None:
        said = core.turn()
        assert said is not None
        for output in said.outputs:
            answer += output.tokens
            reason = output.finished.reason if output.finished else None
    core.close()
    assert "The capital of France is Paris" in tokenizer.decode(answer, skip_special_tokens=True)
    assert reason == "stop"
    assert answer[-1] in device.info.eos_token_ids
