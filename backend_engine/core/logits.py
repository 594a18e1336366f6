"""What a request may ask to change in the model's logits before a token is chosen: masks, bans, bias and penalties.

All of it happens on the device, for the rows that ask for it. The order is that of vLLM: what is not allowed at all,
the shortest answer, bias, penalties; temperature and cuts come after (see the sampler).
"""

from __future__ import annotations

import msgspec
import torch

_BITS = 32


class AdjustedRows(msgspec.Struct, frozen=True):
    """State of the rows whose logits change, gathered from their slots. A of N rows; all on the device. A part is None
    when no row of the step asks for it."""

    rows: torch.Tensor  # [A] int64, which of the N rows
    allowed: torch.Tensor | None = None  # [A, ceil(vocab / 32)] int32, lowest bit first; all ones: everything
    banned: torch.Tensor | None = None  # [A, K] int64, ids that may not come yet, padded with -1
    bias_ids: torch.Tensor | None = None  # [A, B] int64
    bias_values: torch.Tensor | None = None  # [A, B] float32, 0 where there is none
    counts: torch.Tensor | None = None  # [A, vocab] int32, how often the answer holds each id
    prompt_holds: torch.Tensor | None = None  # [A, vocab] bool
    repetition: torch.Tensor | None = None  # [A] float32, these three with `counts`
    presence: torch.Tensor | None = None  # [A] float32
    frequency: torch.Tensor | None = None  # [A] float32


def adjust(logits: torch.Tensor, adjusted: AdjustedRows) -> torch.Tensor:
    """Logits [N, vocab] with those of `adjusted.rows` changed; the given ones stay as they are."""
    changed = logits[adjusted.rows].float()
    if adjusted.allowed is not None:
        ids = torch.arange(changed.shape[1], device=changed.device)
        is_allowed = (adjusted.allowed[:, ids // _BITS] >> (ids % _BITS)) & 1
        changed = changed.masked_fill(is_allowed == 0, float("-inf"))
    if adjusted.banned is not None:
        ban = torch.where(adjusted.banned >= 0, float("-inf"), 0.0).to(changed.dtype)
        changed = changed.scatter_add(1, adjusted.banned.clamp(min=0), ban)
    if adjusted.bias_ids is not None and adjusted.bias_values is not None:
        changed = changed.scatter_add(1, adjusted.bias_ids, adjusted.bias_values)
    if adjusted.counts is not None:
        changed = _penalise(changed, adjusted)
    out = logits.float()
    if out is logits:
        out = logits.clone()
    return out.index_copy_(0, adjusted.rows, changed)


def _penalise(logits: torch.Tensor, adjusted: AdjustedRows) -> torch.Tensor:
    assert adjusted.counts is not None
    assert adjusted.prompt_holds is not None
    assert adjusted.repetition is not None
    assert adjusted.presence is not None
    assert adjusted.frequency is not None
    is_in_answer = adjusted.counts > 0
    factor = torch.where(is_in_answer | adjusted.prompt_holds, adjusted.repetition[:, None], 1.0)
    logits = torch.where(logits > 0, logits / factor, logits * factor)
    logits = logits - adjusted.frequency[:, None] * adjusted.counts
    return logits - adjusted.presence[:, None] * is_in_answer


class Told(msgspec.Struct, frozen=True):
    """Log probabilities for the rows that asked, L of N; on the device."""

    sampled: torch.Tensor  # [L] float32
    top_ids: torch.Tensor  # [L, most] int64
    top_logprobs: torch.Tensor  # [L, most] float32, best first


def log_probabilities(logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, most: int) -> Told:
    """Of the model's own logits [N, vocab] at `rows` [L]: the sampled `tokens` [N], and the `most` likeliest."""
    asked = logits[rows].float()
    mass = asked.logsumexp(-1, keepdim=True)
    top = asked.topk(most, dim=-1)
    sampled = asked.gather(1, tokens[rows].clamp(min=0)[:, None])
    return Told((sampled - mass)[:, 0], top.indices, top.values - mass)
