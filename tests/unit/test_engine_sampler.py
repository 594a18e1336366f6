"""Sampling: greedy, temperature, top_k, top_p and seeds, for all rows of a batch at once."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from backend_engine.core.sampler import LARGEST, SamplingRows, gumbel_noise, sample
from backend_engine.core.step import NO_TOKEN


def rows_of(
    count: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seeds: list[int] | None = None,
    positions: list[int] | None = None,
) -> SamplingRows:
    return SamplingRows(
        rows=torch.arange(count),
        temperature=torch.full((count,), temperature),
        top_k=torch.full((count,), top_k),
        top_p=torch.full((count,), top_p),
        seed=torch.tensor(seeds or [1] * count),
        position=torch.tensor(positions or list(range(count))),
        cuts=top_k > 0 or top_p < 1,
    )


def cut_by_hand(logits: list[float], top_k: int, top_p: float) -> set[int]:
    """Which ids may be sampled, written out."""
    order = sorted(range(len(logits)), key=lambda token: -logits[token])
    if top_k:
        order = order[:top_k]
    total = sum(math.exp(logits[token]) for token in order)
    kept, mass = set(), 0.0
    for token in order:
        if kept and top_p < 1 and mass >= top_p:
            break
        kept.add(token)
        mass += math.exp(logits[token]) / total
    return kept


def test_without_sampling_state_every_row_takes_its_largest_logit() -> None:
    logits = torch.randn(5, 40, dtype=torch.float64)
    assert torch.equal(sample(logits, None), logits.argmax(-1))


def test_frequencies_follow_the_softmax_at_any_temperature() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5])
    draws = 40_000
    for temperature in (0.5, 1.0, 2.0):
        tokens = sample(logits.repeat(draws, 1), rows_of(draws, temperature=temperature))
        counts = torch.bincount(tokens, minlength=5) / draws
        expected = torch.softmax(logits / temperature, -1)
        # five standard deviations of a binomial share
        assert ((counts - expected).abs() < 5 * (expected * (1 - expected) / draws).sqrt()).all()


@pytest.mark.parametrize(
    ("top_k", "top_p"), [(0, 1.0), (1, 1.0), (3, 1.0), (0, 0.5), (0, 0.9), (0, 0.0), (4, 0.8), (1000, 0.99)]
)
def test_what_is_sampled_lies_inside_top_k_and_top_p_and_reaches_all_of_it(top_k: int, top_p: float) -> None:
    logits = torch.tensor([0.1, 2.0, 1.3, -0.4, 0.9, 1.9, -3.0, 0.2])
    tokens = sample(logits.repeat(20_000, 1), rows_of(20_000, top_k=top_k, top_p=top_p))
    assert set(tokens.tolist()) == cut_by_hand(logits.tolist(), top_k, top_p)


def test_a_set_larger_than_the_part_that_is_put_in_order_is_found_all_the_same() -> None:
    vocab = 4 * LARGEST
    logits = torch.linspace(0, 1, vocab)[torch.randperm(vocab, generator=torch.Generator().manual_seed(0))]
    expected = cut_by_hand(logits.tolist(), 0, 0.7)
    assert len(expected) > LARGEST
    seen = Counter(sample(logits.repeat(2000, 1), rows_of(2000, top_p=0.7)).tolist())
    assert set(seen) <= expected
    assert len(seen) > LARGEST


def test_a_row_samples_the_same_whatever_rows_are_beside_it() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(6, 3000, generator=generator) * 2
    state = SamplingRows(
        rows=torch.tensor([0, 2, 3, 5]),
        temperature=torch.tensor([1.0, 0.7, 1.5, 1.0]),
        top_k=torch.tensor([0, 50, 0, 0]),
        top_p=torch.tensor([1.0, 1.0, 0.9, 0.3]),
        seed=torch.tensor([1, 2, -3, 2**62]),
        position=torch.tensor([5, 900, 17, 0]),
        cuts=True,
    )
    together = sample(logits, state)
    assert torch.equal(together[[1, 4]], logits[[1, 4]].argmax(-1))
    for index, row in enumerate(state.rows.tolist()):
        one = slice(index, index + 1)
        alone = SamplingRows(
            rows=torch.tensor([0]),
            temperature=state.temperature[one],
            top_k=state.top_k[one],
            top_p=state.top_p[one],
            seed=state.seed[one],
            position=state.position[one],
            cuts=row != 0,
        )
        assert sample(logits[row : row + 1], alone).item() == together[row].item()


def test_rows_that_are_no_numbers_are_told_apart_and_spoil_no_other() -> None:
    logits = torch.randn(4, 20)
    logits[1, 7] = float("nan")
    logits[2, 3] = float("inf")
    logits[3, 5] = float("-inf")
    for state in (None, rows_of(4)):
        tokens = sample(logits, state).tolist()
        assert tokens[1:3] == [NO_TOKEN, NO_TOKEN]
        assert tokens[0] >= 0
        assert tokens[3] >= 0


def test_noise_is_gumbel_and_changes_with_seed_position_and_token() -> None:
    seeds = torch.tensor([0, 1, 0, -1, 2**63 - 1])
    noise = gumbel_noise(seeds, torch.tensor([0, 0, 1, 0, 0]), 50_000)
    assert torch.isfinite(noise).all()
    assert (noise.mean(-1) - 0.5772).abs().max() < 0.03
    assert (noise.var(-1) - math.pi**2 / 6).abs().max() < 0.06
    correlation = torch.corrcoef(noise).fill_diagonal_(0).abs().max()
    assert correlation < 0.025
    shifted = torch.corrcoef(torch.stack([noise[0, :-1], noise[0, 1:]]))[0, 1].abs()
    assert shifted < 0.025
