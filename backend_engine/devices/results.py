"""Bringing a step's results to the host: sampled ids, what became of each row, and log probabilities if asked for.

On a CPU they are there. On CUDA they are copied to pinned memory by a stream of their own while the next step runs; two
sets of buffers take turns, and one is written again only after the step that used it was waited for. That part is
unverified so far: no GPU was at hand.
"""

from __future__ import annotations

from typing import Protocol

import msgspec
import torch

from backend_engine.core.logits import Told
from backend_engine.core.messages import TokenLogprobs
from backend_engine.devices.step_sampling import StepSampling


class Sampled(msgspec.Struct, frozen=True):
    """What a step leaves, on some device. N rows sampled."""

    tokens: torch.Tensor  # [N] int64
    ends: torch.Tensor  # [N] int32
    told: Told | None

    def tensors(self) -> list[torch.Tensor]:
        """All of it."""
        told = () if self.told is None else (self.told.sampled, self.told.top_ids, self.told.top_logprobs)
        return [self.tokens, self.ends, *told]


class Arrival(Protocol):
    """Results under way to the host."""

    def wait(self) -> Sampled:
        """Blocks until they are there."""


class OnHost:
    """Results of a CPU step: there as soon as it is launched."""

    def __init__(self, sampled: Sampled) -> None:
        self._sampled = sampled

    def wait(self) -> Sampled:
        """Nothing to wait for."""
        return self._sampled


class PinnedBuffers:
    """Two sets of pinned tensors for steps of at most `rows` sampled rows."""

    def __init__(self, device: torch.device, rows: int, most_told: int) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._sets = [_pinned(rows, most_told) for _ in range(2)]
        self._is_unread = [False, False]
        self._turn = 0

    def bring(self, sampled: Sampled) -> Arrival:
        """Starts the copy once the current stream has made the results; waits for nothing."""
        turn = self._turn
        if self._is_unread[turn]:
            raise RuntimeError("a third step was launched before the first of them was waited for")
        self._turn = 1 - turn
        self._is_unread[turn] = True
        self._stream.wait_stream(torch.cuda.current_stream())
        copies = []
        with torch.cuda.stream(self._stream):
            for source, room in zip(sampled.tensors(), self._sets[turn].tensors(), strict=False):
                place = room[tuple(slice(0, size) for size in source.shape)]
                place.copy_(source, non_blocking=True)
                source.record_stream(self._stream)
                copies.append(place)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return _InFlight(self, turn, event, copies)

    def read(self, turn: int) -> None:
        """A set may be written again."""
        self._is_unread[turn] = False


class _InFlight:
    def __init__(self, buffers: PinnedBuffers, turn: int, event: torch.cuda.Event, copies: list[torch.Tensor]) -> None:
        self._buffers = buffers
        self._turn = turn
        self._event = event
        self._copies = copies

    def wait(self) -> Sampled:
        self._event.synchronize()
        tokens, ends, *told = (copy.clone() for copy in self._copies)
        self._buffers.read(self._turn)
        return Sampled(tokens, ends, Told(*told) if told else None)


def _pinned(rows: int, most_told: int) -> Sampled:
    def room(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, pin_memory=True)

    told = Told(
        room(rows, dtype=torch.float32),
        room(rows, most_told, dtype=torch.int64),
        room(rows, most_told, dtype=torch.float32),
    )
    return Sampled(room(rows, dtype=torch.int64), room(rows, dtype=torch.int32), told)


def told_logprobs(sampled: Sampled, how: StepSampling | None, asked: list[int]) -> list[TokenLogprobs | None] | None:
    """Log probabilities for each sampled row, None where none were asked for; `asked` says how many of the likeliest
    for each row that did."""
    if sampled.told is None or how is None:
        return None
    found: list[TokenLogprobs | None] = [None] * len(sampled.tokens)
    own = sampled.told.sampled.tolist()
    ids, values = sampled.told.top_ids.tolist(), sampled.told.top_logprobs.tolist()
    for at, row in enumerate(how.told_at):
        count = asked[at]
        found[row] = TokenLogprobs(own[at], tuple(ids[at][:count]), tuple(values[at][:count]))
    return found
