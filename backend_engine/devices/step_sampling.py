"""Which rows of a step are sampled how: state gathered from the slots for the rows that ask for something.

Who asks for what is known to the host and never changes while a request lives, so nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import torch

from backend_engine.core.logits import AdjustedRows
from backend_engine.core.messages import Sampling
from backend_engine.core.sampler import LEAST_TEMPERATURE, SamplingRows
from backend_engine.core.step import Chunk
from backend_engine.devices.memory import to_device
from backend_engine.devices.slot_rows import SlotRows, has_penalty


class StepSampling(msgspec.Struct, frozen=True):
    """How the sampled rows of one step are sampled; a part is None when no row asks for it."""

    random: SamplingRows | None
    adjusted: AdjustedRows | None
    told_rows: torch.Tensor | None
    """[L] int64: those whose log probabilities are told."""
    told_most: int
    """How many of the likeliest, at most."""
    told_at: tuple[int, ...]
    """`told_rows`, on the host."""


def is_plain(sampling: Sampling) -> bool:
    """Greedy, and nothing is changed or told."""
    return sampling.temperature < LEAST_TEMPERATURE and not adjusts(sampling) and sampling.logprobs is None


def adjusts(sampling: Sampling) -> bool:
    """Whether its logits change before they are drawn from."""
    return bool(sampling.is_masked or sampling.logit_bias or sampling.min_tokens or has_penalty(sampling))


def step_sampling(rows: SlotRows, chunks: Sequence[Chunk], slots: torch.Tensor) -> StepSampling | None:
    """`chunks` are the step's sampled ones, `slots` [N] theirs. None when all are plain."""
    asked = [chunk.request.sampling for chunk in chunks]
    if all(is_plain(sampling) for sampling in asked):
        return None
    told = tuple(row for row, sampling in enumerate(asked) if sampling.logprobs is not None)
    return StepSampling(
        random=_random(rows, chunks, asked, slots),
        adjusted=_adjusted(rows, asked, slots),
        told_rows=to_device(told, np.int64, slots.device) if told else None,
        told_most=max((asked[row].logprobs or 0 for row in told), default=0),
        told_at=told,
    )


def _random(
    rows: SlotRows, chunks: Sequence[Chunk], asked: Sequence[Sampling], slots: torch.Tensor
) -> SamplingRows | None:
    random = [row for row, sampling in enumerate(asked) if sampling.temperature >= LEAST_TEMPERATURE]
    if not random:
        return None
    at = to_device(random, np.int64, slots.device)
    slots = slots[at]
    positions = [chunks[row].start + chunks[row].count for row in random]
    return SamplingRows(
        rows=at,
        temperature=rows.temperature[slots],
        top_k=rows.top_k[slots],
        top_p=rows.top_p[slots],
        seed=rows.seed[slots],
        position=to_device(positions, np.int64, slots.device),
        cuts=any(asked[row].top_k > 0 or asked[row].top_p < 1 for row in random),
        min_p=rows.min_p[slots] if any(asked[row].min_p > 0 for row in random) else None,
    )


def _adjusted(rows: SlotRows, asked: Sequence[Sampling], slots: torch.Tensor) -> AdjustedRows | None:
    changed = [row for row, sampling in enumerate(asked) if adjusts(sampling)]
    if not changed:
        return None
    at = to_device(changed, np.int64, slots.device)
    slots = slots[at]
    found: dict[str, torch.Tensor] = {}
    those = [asked[row] for row in changed]
    if any(sampling.is_masked for sampling in those):
        is_masked = to_device([sampling.is_masked for sampling in those], np.bool_, slots.device)
        found["allowed"] = torch.where(is_masked[:, None], rows.masks[slots], -1)
    if any(sampling.min_tokens for sampling in those):
        outputs = rows.state.length[slots] - rows.state.prompt_length[slots]
        is_short = outputs < rows.min_tokens[slots]
        found["banned"] = torch.where(is_short[:, None], rows.state.stop_ids[slots], -1).long()
    if any(sampling.logit_bias for sampling in those):
        has_bias = to_device([bool(sampling.logit_bias) for sampling in those], np.bool_, slots.device)
        found["bias_ids"] = rows.bias_ids[slots]
        found["bias_values"] = torch.where(has_bias[:, None], rows.bias_values[slots], 0.0)
    if any(has_penalty(sampling) for sampling in those):
        found["counts"] = rows.state.counts[slots]
        found["prompt_holds"] = rows.prompt_holds[slots]
        found["repetition"] = rows.repetition[slots]
        found["presence"] = rows.presence[slots]
        found["frequency"] = rows.frequency[slots]
    return AdjustedRows(at, **found)
