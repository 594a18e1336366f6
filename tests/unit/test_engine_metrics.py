"""The engine's own metrics, where they take a short cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram

from backend_engine.metrics import observe_often

BOUNDS = (0.01, 0.1, 1.0)


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.01, 0.05, 0.1, 0.5, 1.0, 7.0]), st.integers(1, 300)), max_size=8))
def test_many_observations_at_once_are_as_many_one_by_one(observed: list[tuple[float, int]]) -> None:
    at_once, registry = CollectorRegistry(), CollectorRegistry()
    short = Histogram("h", "h", ("model",), registry=at_once, buckets=BOUNDS).labels("m")
    plain = Histogram("h", "h", ("model",), registry=registry, buckets=BOUNDS).labels("m")
    for amount, times in observed:
        observe_often(short, amount, times)
        for _ in range(times):
            plain.observe(amount)
    for name, labels in [("h_sum", {}), ("h_count", {}), *(("h_bucket", {"le": str(bound)}) for bound in BOUNDS)]:
        found = at_once.get_sample_value(name, {"model": "m"} | labels)
        assert found == pytest.approx(registry.get_sample_value(name, {"model": "m"} | labels))
