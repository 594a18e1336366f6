"""The simulated device: a forward of known length, and tokens drawn from a seed. It is the oracle of all timing tests.

A step of p prompt tokens and d decoding sequences occupies the device for
`forward_ms + p * prefill_token_us + d * decode_token_us`. A step starts at the later of its launch and the end of the
step before it, and ends at the computed instant: how late the host wakes up is never part of a step, and never adds up
in the device's own time line. While it is "busy" the device uses no CPU. It is always labelled as simulated.

With slot state (for measurements) it runs the slot kernels on real tensors too, and they are charged to the step.
"""

from __future__ import annotations

import ctypes
import sys
import time
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from backend_engine.core.messages import Ready
from backend_engine.core.slots import Opening
from backend_engine.core.step import StepPlan, StepResult
from backend_engine.devices.sizing import GIB, kv_bytes, kv_pages
from settings.schema import Settings
from tracing.clock import Clock

if TYPE_CHECKING:
    from backend_engine.devices.slot_rows import SlotRows

ALPHABET = b" abcdefghijklmnopqrstuvwxyz"
"""Ids that are drawn: one visible character each. The vocabulary is the 256 bytes, and one end token."""
EOS = 256
VOCAB_SIZE = 257
MAX_MODEL_LEN = 32_768
BYTES_PER_TOKEN = 2048
"""Nominal, so that the settings that size a real cache size this one too."""

_PR_SET_TIMERSLACK = 29
_MASK = (1 << 64) - 1


def mix(number: int) -> int:
    """A 64-bit hash (the finaliser of splitmix64)."""
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)


def sleeper(clock: Clock) -> Callable[[int], None]:
    """A function that sleeps until an instant of `clock`, with the kernel's timer slack at its least on this thread."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)

    def sleep_until(instant_ns: int) -> None:
        while (left_ns := instant_ns - clock.mono_ns()) > 0:
            time.sleep(left_ns / 1e9)

    return sleep_until


class SimulatedFlight(msgspec.Struct, frozen=True):
    """A step on the simulated time line; its end is known when it starts."""

    result: StepResult
    sleep_until: Callable[[int], None]

    def wait(self) -> StepResult:
        """Sleeps until the step has ended."""
        self.sleep_until(self.result.end_ns)
        return self.result


class SimulatedDevice:
    """`sleep_until` is injected, so that tests own time."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        sleep_until: Callable[[int], None],
        rows: SlotRows | None = None,
    ) -> None:
        self._times = settings.simulated
        self._clock = clock
        self._sleep_until = sleep_until
        self._rows = rows
        self._end_ns = 0
        self._keys: dict[int, int] = {}
        max_model_len = settings.engine.max_model_len or MAX_MODEL_LEN
        cache_bytes = kv_bytes(settings, int(settings.engine.cpu_kv_cache_gib * GIB), weight_bytes=0)
        self.info = Ready(
            device="simulated",
            dtype="none",
            max_model_len=max_model_len,
            vocab_size=VOCAB_SIZE,
            weight_bytes=0,
            kv_pages=kv_pages(settings, cache_bytes, BYTES_PER_TOKEN, max_model_len),
            page_size=settings.engine.page_size,
            eos_token_ids=(EOS,),
        )

    def launch(self, plan: StepPlan) -> SimulatedFlight:
        """Puts the step on the time line; returns at once."""
        launched_ns = self._clock.mono_ns()
        for opening in plan.opened:
            self._keys[opening.slot] = self._key(opening)
        if self._rows is not None:
            self._rows.open(plan.opened)
            self._rows.add_pages(plan.pages)
        ready_ns = self._clock.mono_ns()
        start_ns = max(ready_ns, self._end_ns)
        # from here on the device is busy: what the host spends on drawing is no part of any gap
        tokens = [
            ALPHABET[mix(self._keys[chunk.slot] + chunk.start + chunk.count) % len(ALPHABET)]
            for chunk in plan.chunks
            if chunk.samples
        ]
        ends, kernel_ns = self._run_slot_kernels(plan, tokens)
        self._end_ns = start_ns + self._duration_ns(plan) + kernel_ns
        result = StepResult(tokens, start_ns, self._end_ns, kernel_ns, prepare_ns=ready_ns - launched_ns, ends=ends)
        return SimulatedFlight(result, self._sleep_until)

    def _run_slot_kernels(self, plan: StepPlan, tokens: list[int]) -> tuple[list[bool] | None, int]:
        """What the slot state says of the sampled rows, and how long that took."""
        if self._rows is None:
            return None, 0
        import torch

        began_ns = self._clock.mono_ns()
        self._rows.gather(plan.chunks)
        slots = self._rows.slot_ids([chunk for chunk in plan.chunks if chunk.samples])
        ends = self._rows.advance(slots, torch.tensor(tokens, dtype=torch.int64))
        return (ends != 0).tolist(), self._clock.mono_ns() - began_ns

    def _duration_ns(self, plan: StepPlan) -> int:
        prefill_us = plan.prefill_tokens * self._times.prefill_token_us
        decode_us = plan.decodes * self._times.decode_token_us
        return round(self._times.forward_ms * 1e6 + (prefill_us + decode_us) * 1e3)

    def _key(self, opening: Opening) -> int:
        """What a sequence's tokens are drawn from: its seed, or when it is greedy its prompt; never its company."""
        own = opening.seed
        if opening.sampling.temperature == 0:
            prompt = opening.tokens[: opening.prompt_tokens]
            own = zlib.crc32(b",".join(b"%d" % token for token in prompt))
        return mix(mix(self._times.seed & _MASK) ^ (own & _MASK))
