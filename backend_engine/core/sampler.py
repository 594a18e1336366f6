"""Chooses the next token of every row of a batch, on the device that holds the logits.

Greedy rows take the largest logit. The others add Gumbel noise to logits / temperature and take the largest sum, which
draws from the softmax exactly (the Gumbel-max trick). The noise is a hash of (seed, position, token id): no generator
has a state, so a seeded request gets the same noise in any batch, in any slot, on any device. Noise on each token is
preferred to one draw along the cumulated probabilities, because there one rounding in any probability shifts all tokens
after it, and batches of other sizes do round differently.
"""

from __future__ import annotations

import msgspec
import torch

from backend_engine.core.logits import AdjustedRows, adjust
from backend_engine.core.step import NO_TOKEN

LEAST_TEMPERATURE = 1e-5
"""Below this a row is greedy: dividing by less would overflow float32."""
LARGEST = 512
"""Logits of a row that are put in order for top_k and top_p at first: 14 times as fast as sorting 49 152 of them."""


class SamplingRows(msgspec.Struct, frozen=True):
    """Sampling state of the rows that are not greedy, gathered from their slots. R of N rows; all on the device."""

    rows: torch.Tensor  # [R] int64, which of the N rows
    temperature: torch.Tensor  # [R] float32, at least LEAST_TEMPERATURE
    top_k: torch.Tensor  # [R] int64, 0: off
    top_p: torch.Tensor  # [R] float32, 1: off
    seed: torch.Tensor  # [R] int64
    position: torch.Tensor  # [R] int64, of the token that is sampled, in its sequence
    cuts: bool
    """Some row has top_k or top_p on. What a row samples does not depend on other rows' being cut."""
    min_p: torch.Tensor | None = None  # [R] float32, 0: off; None: off for all


def sample(logits: torch.Tensor, sampling: SamplingRows | None, adjusted: AdjustedRows | None = None) -> torch.Tensor:
    """Next token ids, [N] int64, from logits [N, vocab]; NO_TOKEN for a row whose logits are no numbers."""
    if adjusted is not None:
        logits = adjust(logits, adjusted)
    best, tokens = logits.max(dim=-1)
    if sampling is not None:
        tokens[sampling.rows] = _draw(logits[sampling.rows].float(), sampling)
    return tokens.masked_fill_(~torch.isfinite(best), NO_TOKEN)


def _draw(logits: torch.Tensor, sampling: SamplingRows) -> torch.Tensor:
    logits = logits / sampling.temperature[:, None]
    if sampling.min_p is not None:
        least = logits.amax(-1, True) + sampling.min_p.log()[:, None]
        logits = logits.masked_fill(logits < least, float("-inf"))
    if sampling.cuts:
        logits = _cut(logits, sampling.top_k, sampling.top_p)
    return (logits + gumbel_noise(sampling.seed, sampling.position, logits.shape[1])).argmax(dim=-1)


def _cut(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, largest: int = LARGEST) -> torch.Tensor:
    """Rules out (-inf) what lies below the top_k largest logits, and then what lies below the smallest set of largest
    probabilities that sums to top_p. The largest always stays, and so does what equals the smallest that stays.

    Only the `largest` logits are put in order; the few rows whose set is larger are done again with more of them.
    """
    vocab = logits.shape[1]
    # on CUDA all are put in order: a host that looked whether a set is larger than `largest` would wait for the device
    largest = vocab if logits.is_cuda else min(vocab, max(largest, int(top_k.max())))
    ordered = logits.topk(largest, dim=-1).values  # [R, largest]
    rank = torch.arange(largest, device=logits.device)
    has_k = top_k[:, None] > 0
    is_in = (rank < top_k[:, None]) | ~has_k
    log_mass = torch.where(
        has_k, ordered.masked_fill(~is_in, float("-inf")).logsumexp(-1, True), logits.logsumexp(-1, True)
    )
    probabilities = (ordered - log_mass).exp().masked_fill_(~is_in, 0)
    mass_before = probabilities.cumsum(-1) - probabilities
    is_in &= (mass_before < top_p[:, None]) | (top_p[:, None] >= 1) | (rank == 0)
    least = ordered.masked_fill(~is_in, float("inf")).amin(-1, True)
    is_uncut = ~has_k & (top_p[:, None] >= 1)
    cut = logits.masked_fill((logits < least) & ~is_uncut, float("-inf"))
    if largest < vocab:
        again = (is_in.all(-1) & ~has_k[:, 0] & ~is_uncut[:, 0]).nonzero()[:, 0]
        if len(again):
            cut[again] = _cut(logits[again], top_k[again], top_p[again], 8 * largest)
    return cut


def gumbel_noise(seed: torch.Tensor, position: torch.Tensor, vocab: int) -> torch.Tensor:
    """Standard Gumbel noise, [R, vocab] float32, that depends on (seed, position, token id) alone."""
    key = _mix64(seed ^ _mix64(position))
    low, high = key.to(torch.int32)[:, None], (key >> 32).to(torch.int32)[:, None]
    noise = torch.arange(vocab, dtype=torch.int32, device=seed.device)[None, :] ^ low
    noise = _mix32_(_mix32_(noise).bitwise_xor_(high))
    # 23 bits and a half: exact in float32, and never 0 or 1, so both logarithms are finite
    uniform = noise.bitwise_right_shift_(9).bitwise_and_(0x7FFFFF).float().add_(0.5).mul_(2.0**-23)
    return uniform.log_().neg_().log_().neg_()


def _mix64(number: torch.Tensor) -> torch.Tensor:
    """The finaliser of splitmix64 on int64; products wrap, and shifts are made logical by a mask."""
    number = number + -0x61C8864680B583EB  # 0x9E3779B97F4A7C15
    number = (number ^ ((number >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
    number = (number ^ ((number >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB
    return number ^ ((number >> 31) & 0x1FFFFFFFF)


def _mix32_(number: torch.Tensor) -> torch.Tensor:
    """A 32-bit hash of low bias (Wellons' lowbias32), in place on int32."""
    number ^= (number >> 16) & 0xFFFF
    number *= 0x7FEB352D
    number ^= (number >> 15) & 0x1FFFF
    number *= -0x7B935975  # 0x846CA68B
    number ^= (number >> 16) & 0xFFFF
    return number
