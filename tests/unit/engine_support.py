"""What the engine's tests share: settings, tiny random models on disk, and a driver without a process."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import transformers

from backend_engine.core.forward import start_forward
from backend_engine.core.loop import EngineCore
from backend_engine.core.messages import Abort, Finished, Output, Outputs, Sampling, Scheduled, Step, Submit
from backend_engine.core.step import Device, Flight, StepPlan, StepResult
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


IN_ORDER = {"async_scheduling": False, "overlap_token_interval": False}
"""The loop that is the oracle of the others: schedule, forward and process in turn."""
ORDERS: dict[str, dict[str, bool]] = {
    "in order": IN_ORDER,
    "overlapped": {"async_scheduling": False, "overlap_token_interval": True},
    "two threads": {"async_scheduling": True, "overlap_token_interval": False},
    "pipelined": {"async_scheduling": True, "overlap_token_interval": True},
}


def settings_of(**sections: dict[str, Any]) -> Settings:
    """Settings with these keys changed; the loop runs in order unless it is said otherwise."""
    return Settings.model_validate({"state_dir": "/nowhere", "token_interval": IN_ORDER, **sections})


class Driver:
    """Hands messages to a core, gives it turns, and keeps all that it says."""

    def __init__(self, device: Device, settings: Settings, clock: Clock) -> None:
        self.clock = clock
        self._seeds = iter(range(10_000, 1_000_000))
        forward = start_forward(lambda: device, has_thread=settings.token_interval.async_scheduling)
        self.core = EngineCore(forward, settings, clock, draw_seed=lambda: next(self._seeds))
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
        slots, pages = self.core.slots, self.core.pages
        slots.check()
        pages.check()
        assert (slots.used, pages.used) == (0, 0)
        assert pages.free + pages.cached == pages.count

    def close(self) -> None:
        """The core must be idle: everything is free, and its gauges say so."""
        self.core.close()
        self.assert_all_free()
        if self.said:
            gauges = self.said[-1].gauges
            assert (gauges.running, gauges.waiting, gauges.kv_used) == (0, 0, 0)


class BreakingDevice:
    """Passes steps on to another device, and breaks those that `breaks` has an error for (it is told the plan and the
    step's number from 1), at launch or while they run."""

    def __init__(
        self, inner: Device, breaks: Callable[[StepPlan, int], Exception | None], at_launch: bool = True
    ) -> None:
        self.info = inner.info
        self._inner = inner
        self._breaks = breaks
        self._at_launch = at_launch
        self._step = 0

    def launch(self, plan: StepPlan) -> Flight:
        self._step += 1
        error = self._breaks(plan, self._step)
        if error is None:
            return self._inner.launch(plan)
        if self._at_launch:
            raise error
        return BrokenFlight(self._inner.launch(plan), error)


class BrokenFlight:
    """A step that was launched, and failed."""

    def __init__(self, inner: Flight, error: Exception) -> None:
        self._inner = inner
        self._error = error

    def wait(self) -> StepResult:
        """Raises why."""
        self._inner.wait()
        raise self._error


def simulated(settings: Settings, wrap: Callable[[Device], Device] = lambda device: device) -> tuple[Driver, FakeClock]:
    """A core over the simulated device, with a clock that moves only when the device sleeps or a test says so."""
    clock = FakeClock()

    def sleep_until(instant_ns: int) -> None:
        clock.advance_ms(max(0, instant_ns - clock.mono_ns()) / 1e6)

    return Driver(wrap(SimulatedDevice(settings, clock, sleep_until)), settings, clock), clock


def prompts(lengths: Iterable[int], seed: int = 0) -> list[list[int]]:
    """Random prompts."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def generated(model: Any, prompt: list[int], max_tokens: int) -> list[int]:
    """The tokens that transformers itself answers with, greedily."""
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=max_tokens,
        min_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    found: list[int] = out[0, len(prompt) :].tolist()
    return found
