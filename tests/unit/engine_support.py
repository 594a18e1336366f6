"""What the engine's tests share: settings, tiny random models on disk, and a driver without a process."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import transformers

from backend_engine.core.loop import EngineCore
from backend_engine.core.messages import Abort, Finished, Output, Outputs, Sampling, Scheduled, Step, Submit
from backend_engine.core.step import Device
from backend_engine.devices.simulated import SimulatedDevice
from settings.schema import Settings
from tracing.clock import Clock, FakeClock

VOCAB = 97

_TINY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,  # far from uniform logits, so that greedy choices aren't ties
}

TINY_MODELS: dict[str, Callable[[], Any]] = {
    "llama with grouped queries": lambda: transformers.LlamaConfig(**_TINY),
    "mistral with a sliding window": lambda: transformers.MistralConfig(**_TINY, sliding_window=7),
    "qwen3 with windows in some layers": lambda: transformers.Qwen3Config(
        **_TINY, use_sliding_window=True, sliding_window=6, max_window_layers=1
    ),
    "gemma2 with soft-capping and windows": lambda: transformers.Gemma2Config(
        **_TINY, sliding_window=5, attn_logit_softcapping=3.0, final_logit_softcapping=4.0, query_pre_attn_scalar=16
    ),
    "gpt2 with learned positions": lambda: transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=256, initializer_range=0.3, eos_token_id=2
    ),
}


def write_tiny_model(folder: Path, kind: str, dtype: torch.dtype = torch.float32) -> Any:
    """Saves a random model in `folder` and returns it."""
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(TINY_MODELS[kind](), dtype=dtype).eval()
    model.save_pretrained(folder)
    return model


def settings_of(**sections: dict[str, Any]) -> Settings:
    """Settings with these keys changed."""
    return Settings.model_validate({"state_dir": "/nowhere", **sections})


class Driver:
    """Hands messages to a core, gives it turns, and keeps all that it says."""

    def __init__(self, device: Device, settings: Settings, clock: Clock) -> None:
        self.clock = clock
        self._seeds = iter(range(10_000, 1_000_000))
        self.core = EngineCore(device, settings, clock, draw_seed=lambda: next(self._seeds))
        self.said: list[Outputs] = []
        self.outputs: dict[str, list[Output]] = defaultdict(list)

    def submit(self, request_id: str, prompt: list[int], max_tokens: int, **sampling: Any) -> None:
        """Queues a request now."""
        sampling = {"temperature": 0.0, **sampling}
        self.core.take(Submit(request_id, prompt, Sampling(max_tokens=max_tokens, **sampling), self.clock.mono_ns()))

    def abort(self, request_id: str, asked_ns: int | None = None) -> None:
        """Asks for an abort."""
        self.core.take(Abort(request_id, self.clock.mono_ns() if asked_ns is None else asked_ns))

    def turn(self) -> Outputs | None:
        """One turn."""
        said = self.core.turn()
        if said is not None:
            self.said.append(said)
            for output in said.outputs:
                self.outputs[output.request_id].append(output)
        return said

    def run(self) -> None:
        """Turns until the core is idle."""
        self.turn()
        while self.core.wait_ns() is not None:
            self.turn()

    @property
    def steps(self) -> list[Step]:
        """All steps so far."""
        return [step for said in self.said for step in said.steps]

    def tokens(self, request_id: str) -> list[int]:
        """All tokens of a request so far."""
        return [token for output in self.outputs[request_id] for token in output.tokens]

    def scheduled(self, request_id: str) -> Scheduled:
        """What came with the first token."""
        found = [output.scheduled for output in self.outputs[request_id] if output.scheduled is not None]
        assert len(found) == 1
        return found[0]

    def finished(self, request_id: str) -> Finished:
        """What came at the end, which must have come once and last."""
        found = [output.finished for output in self.outputs[request_id]]
        assert [item is not None for item in found] == [False] * (len(found) - 1) + [True]
        assert found[-1] is not None
        return found[-1]

    def assert_all_free(self) -> None:
        """The invariant at idle."""
        self.core.slots.check()
        self.core.pages.check()
        assert (self.core.slots.used, self.core.pages.used) == (0, 0)


def simulated(settings: Settings) -> tuple[Driver, FakeClock]:
    """A core over the simulated device, with a clock that moves only when the device sleeps or a test says so."""
    clock = FakeClock()

    def sleep_until(instant_ns: int) -> None:
        clock.advance_ms(max(0, instant_ns - clock.mono_ns()) / 1e6)

    return Driver(SimulatedDevice(settings, clock, sleep_until), settings, clock), clock


def prompts(lengths: Iterable[int], seed: int = 0) -> list[list[int]]:
    """Random prompts."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in lengths]
