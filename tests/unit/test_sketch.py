"""The quantile sketch keeps its promise: quantiles to a stated relative error, and merging that loses nothing."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracing.observer.sketch import RELATIVE_ERROR, SMALLEST, Sketch

VALUES = st.lists(st.floats(0, 1e6), min_size=1, max_size=200)
SHARES = (0.0, 0.25, 0.5, 0.95, 0.99, 1.0)


def sketch_of(values: list[float]) -> Sketch:
    made = Sketch()
    for value in values:
        made.add(value)
    return made


@given(VALUES)
def test_every_quantile_is_within_the_stated_relative_error(values):
    ordered = sorted(values)
    for share, found in zip(SHARES, sketch_of(values).quantiles(SHARES), strict=True):
        true = ordered[math.floor(share * (len(ordered) - 1))]
        assert found == pytest.approx(true, rel=RELATIVE_ERROR + 1e-9, abs=SMALLEST)


@given(VALUES, VALUES)
def test_a_merged_sketch_is_the_sketch_of_both(one, other):
    merged = sketch_of(one)
    merged.merge(sketch_of(other))
    assert merged == sketch_of(one + other)
    assert merged.total == len(one) + len(other)


@given(VALUES, st.floats(0, 1e6))
def test_the_share_below_a_value_counts_what_is_surely_smaller(values, value):
    share = sketch_of(values).share_below(value)
    surely = sum(v < value * (1 - 2 * RELATIVE_ERROR) - SMALLEST for v in values)
    perhaps = sum(v <= value * (1 + 2 * RELATIVE_ERROR) + SMALLEST for v in values)
    assert surely - 1e-9 <= share * len(values) <= perhaps + 1e-9


def test_no_value_however_wild_makes_more_buckets_than_the_range_holds():
    wild = sketch_of([-1.0, 0.0, 1e-300, 1e300, math.inf, *(10.0**e for e in range(-320, 308))])
    assert len(wild.counts) < 700
    assert wild.quantiles([1.0])[0] == pytest.approx(1e7, rel=RELATIVE_ERROR)


def test_an_empty_sketch_says_that_it_knows_nothing():
    with pytest.raises(ValueError, match="without values"):
        Sketch().quantiles([0.5])
    assert math.isnan(Sketch().share_below(1.0))
