"""One step: what the scheduler plans, and what the device answers. All that passes between them is named here."""

from __future__ import annotations

from typing import Protocol

import msgspec

from backend_engine.core.messages import Ready
from backend_engine.core.request import Request
from backend_engine.core.slots import Slot

NO_TOKEN = -1
"""In place of a sampled id: this row's logits were no numbers, and no other row is to blame."""


class Chunk(msgspec.Struct, frozen=True):
    """One sequence's part in a step: tokens `start` to `start + count` of its row."""

    request: Request
    slot: int
    start: int
    count: int
    samples: bool
    """The step samples this sequence's next token (not so for a prefill chunk that is not the prompt's last)."""
    decodes: bool
    """The chunk is one token that was sampled before; else it is a piece of the prompt."""


class StepPlan(msgspec.Struct, frozen=True):
    """One step, built by the host from what it knows without waiting for any sampled token."""

    opened: tuple[Slot, ...]
    """Rows whose owner is new: the device opens them before the forward."""
    chunks: tuple[Chunk, ...]
    """Decoding sequences first, then pieces of prompts in the order of arrival."""
    decodes: int
    """How many of `chunks` decode."""
    tokens: int
    schedule_ns: int
    """Host time that building this plan took."""

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens in the step."""
        return self.tokens - self.decodes


class StepResult(msgspec.Struct, frozen=True):
    """What a device says when a step has ended. Times are monotonic ns of the core's clock."""

    tokens: list[int]
    """Sampled id for each chunk that samples, in their order; NO_TOKEN where sampling was impossible."""
    start_ns: int
    """Later of the launch and the end of the device's previous step."""
    end_ns: int
    slot_kernel_ns: int
    """The part of the step that sampled and appended tokens."""


class OutOfDeviceMemory(Exception):
    """A step needed more memory than the device had."""


class Flight(Protocol):
    """A step that was launched."""

    def wait(self) -> StepResult:
        """Blocks until the step has ended. Raises what the step raised."""


class Device(Protocol):
    """Where forwards run."""

    info: Ready
    """What it serves, as the frontend is told."""

    def launch(self, plan: StepPlan) -> Flight:
        """Opens the plan's new rows and starts the step. Steps run in the order in which they were launched."""
