"""One step: what the scheduler plans, and what the device answers. All that passes between them is named here."""

from __future__ import annotations

from typing import Protocol

import msgspec

from backend_engine.core.messages import Ready, TokenLogprobs
from backend_engine.core.request import Request
from backend_engine.core.slots import NewPage, Opening

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
    """The chunk is one token that the step before sampled, and the device alone knows it; else the host told all."""
    epoch: int
    """The request's when this was planned."""


class RowMask(msgspec.Struct, frozen=True):
    """Which tokens a row may sample in this step."""

    slot: int
    allowed: bytes
    """As in the message `Mask`."""


class StepPlan(msgspec.Struct, frozen=True):
    """One step, built by the host from what it knows without waiting for any sampled token."""

    opened: tuple[Opening, ...]
    """Rows that the device writes whole before the forward: those of new owners; all of them without slot reuse."""
    pages: tuple[NewPage, ...]
    """What was added to the block tables of the other rows."""
    masks: tuple[RowMask, ...]
    chunks: tuple[Chunk, ...]
    """Decoding sequences first, then pieces of prompts in the order of arrival."""
    decodes: int
    """How many of `chunks` decode."""
    tokens: int
    schedule_ns: int
    """Host time that building this plan took."""

    @property
    def prefill_tokens(self) -> int:
        """Tokens in the step that the host knows."""
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
    prepare_ns: int = 0
    """Host time that handing the step to the device took, before it started."""
    logprobs: list[TokenLogprobs | None] | None = None
    """For each sampled id of a request that asked; None when no request of the step did."""
    ends: list[bool] | None = None
    """Whether the device found each sampled id to be its row's last; None from a device without slot kernels."""


class OutOfDeviceMemory(Exception):
    """A step needed more memory than the device had."""


class StepVoid(Exception):
    """A step was not launched, because one that it counted on had failed."""


class Flight(Protocol):
    """A step that was launched."""

    def wait(self) -> StepResult:
        """Blocks until the step has ended. Raises what the step raised."""


class Device(Protocol):
    """Where forwards run."""

    info: Ready
    """What it serves, as the frontend is told."""

    def launch(self, plan: StepPlan) -> Flight:
        """Writes the plan's rows, starts the step, and waits for nothing that the host has no need of. Steps run in the
        order in which they were launched. At most one flight is waited for at a time while one more is under way."""
