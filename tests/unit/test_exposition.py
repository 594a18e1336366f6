"""The /metrics page: what prometheus_client would write, byte for byte."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies
from ledgers import ledger
from meters_rig import Rig
from prometheus_client import CollectorRegistry, Counter, Enum, Gauge, Histogram, Info
from prometheus_client import exposition as text_format
from prometheus_client.openmetrics import exposition as openmetrics

from tracing.metrics import Metric
from tracing.observer.exposition import encoder_for, write
from tracing.observer.histogram import Histogram as Quick

TEXTS = strategies.text(max_size=12) | strategies.sampled_from(['"', "\\", "\n", '\\"\n', "ü", "a,b={c}"])
NUMBERS = strategies.floats(allow_nan=True, allow_infinity=True) | strategies.integers(0, 10**15)


def assert_same(registry: CollectorRegistry) -> None:
    assert write(registry, openmetrics=True) == openmetrics.generate_latest(registry)
    assert write(registry, openmetrics=False) == text_format.generate_latest(registry)


@settings(max_examples=60, deadline=None)
@given(
    strategies.lists(strategies.tuples(TEXTS, TEXTS, NUMBERS), max_size=6),
    strategies.lists(strategies.floats(0, 1e9), max_size=6),
    TEXTS,
)
def test_every_kind_of_metric_is_written_as_the_library_writes_it(
    series: list[tuple[str, str, float]], values: list[float], words: str
) -> None:
    registry = CollectorRegistry()
    gauge = Gauge("a_gauge", words, ("zone", "area"), registry=registry)
    counter = Counter("things_total", 'help with "quotes" \\ and\nlines', ("kind",), registry=registry)
    histogram = Histogram("took_seconds", words, ("zone", "area"), buckets=(0.001, 1, 1e6), registry=registry)
    Histogram("bare_seconds", "no labels", registry=registry).observe(2)
    Info("build", words, registry=registry).info({"version": words, "about": "x"})
    for zone, area, number in series:
        gauge.labels(zone, area).set(number)
        counter.labels(zone).inc(abs(number) if number == number else 1)
        for value in values:
            exemplar = {"trace_id": "ab" * 16} if value > 1 else None
            histogram.labels(zone, area).observe(value, exemplar)
    assert_same(registry)


@settings(max_examples=60, deadline=None)
@given(
    strategies.lists(strategies.tuples(TEXTS, TEXTS, strategies.floats(-1, 1e7), strategies.booleans()), max_size=20)
)
def test_our_histograms_are_the_librarys(values: list[tuple[str, str, float, bool]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    bounds, labels = (0.001, 0.5, 1.0, 1e6), ("zone", "area")
    metric = Metric("took_seconds", "histogram", 'how "long"', labels, bounds)
    quick = Quick(metric, ours, lambda: 1.5)
    bare = Quick(Metric("bare_seconds", "histogram", "x", (), bounds), ours)
    slow = Histogram("took_seconds", 'how "long"', labels, buckets=bounds, registry=theirs)
    slow_bare = Histogram("bare_seconds", "x", buckets=bounds, registry=theirs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("prometheus_client.metrics.time.time", lambda: 1.5)
        for zone, area, value, has_exemplar in values:
            exemplar = {"trace_id": "ab" * 16} if has_exemplar else None
            quick.observe(value, (zone, area), exemplar)
            slow.labels(zone, area).observe(value, exemplar)
            bare.observe(value)
            slow_bare.observe(value)
    for openmetrics_wanted, encode in ((True, openmetrics.generate_latest), (False, text_format.generate_latest)):
        page = write(ours, openmetrics=openmetrics_wanted)
        assert page == encode(theirs)
        assert page == encode(ours), "other readers of the registry see the same"


def test_what_is_not_a_number_is_not_observed_and_labels_must_be_all_there() -> None:
    registry = CollectorRegistry()
    histogram = Quick(Metric("x_seconds", "histogram", "x", ("a",), (1.0,)), registry)
    histogram.observe(float("nan"), ("v",))
    assert registry.get_sample_value("x_seconds_count", {"a": "v"}) == 0
    with pytest.raises(ValueError, match=r"x_seconds has the labels \('a',\)"):
        histogram.observe(1.0)
    with pytest.raises(ValueError, match="Duplicated"):
        Quick(Metric("x_seconds", "histogram", "x", ("a",), (1.0,)), registry)


def test_the_gateways_own_page_is_the_librarys() -> None:
    rig = Rig()
    rig.close(ledger(team='a "team"', model="m\\1"))
    assert_same(rig.registry)
    assert b"trace_id=" in write(rig.registry, openmetrics=True)


@pytest.mark.parametrize(
    "accept",
    [
        "",
        "*/*",
        "text/plain",
        "text/plain;version=0.0.4",
        "text/plain;version=1.0.0;escaping=allow-utf-8",
        "application/openmetrics-text",
        "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;q=0.4",
        "application/openmetrics-text; version=1.0.0; escaping=dots",
        "application/openmetrics-text; version=1.0.0; escaping=values",
    ],
)
def test_whatever_a_scraper_asks_for_it_gets_what_the_library_gives(accept: str) -> None:
    rig = Rig()
    rig.close(ledger())
    ours, content_type = encoder_for(accept)
    theirs, expected_type = text_format.choose_encoder(accept)
    assert content_type == expected_type
    assert ours(rig.registry) == theirs(rig.registry)


def test_a_kind_that_is_not_written_here_is_refused_by_name() -> None:
    registry = CollectorRegistry()
    Enum("mood", "x", states=["up", "down"], registry=registry)
    with pytest.raises(ValueError, match="metric mood is a stateset"):
        write(registry, openmetrics=True)
