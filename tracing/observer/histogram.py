"""Histograms of the observer: prometheus_client's in what they show, made to be written and observed quickly.

A full page is 40,000 lines, nine in ten of them buckets; and each request is observed in some twenty histograms. They
are observed by one thread (the observer's loop) and read by another (the page's), which sees each of them as it was at
some moment. To the registry they are collectors like any other.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.samples import Exemplar, Sample
from prometheus_client.utils import floatToGoString

from tracing.metrics import Metric


class Observations:
    """What was observed with one set of labels."""

    __slots__ = ("bounds", "counts", "exemplars", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """Of each bucket alone; the last is what lies above all bounds."""
        self.exemplars: dict[int, Exemplar] = {}
        self.total = 0.0

    def observe(self, value: float, exemplar: dict[str, str] | None, wall_seconds: Callable[[], float]) -> None:
        """One value; what is not a number is left out."""
        if value != value:
            return
        bucket = bisect_left(self.bounds, value)
        self.counts[bucket] += 1
        self.total += value
        if exemplar is not None:
            self.exemplars[bucket] = Exemplar(exemplar, value, wall_seconds())


class Histogram:
    """One histogram of the catalogue. Registers itself."""

    def __init__(
        self, metric: Metric, registry: CollectorRegistry, wall_seconds: Callable[[], float] = time.time
    ) -> None:
        self.metric = metric
        self.edges = [number_text(bound) for bound in (*metric.buckets, float("inf"))]
        self._wall_seconds = wall_seconds
        self._series: dict[tuple[str, ...], Observations] = {}
        if not metric.labels:
            self._series[()] = Observations(metric.buckets)
        registry.register(self)

    def observe(self, value: float, labels: tuple[str, ...] = (), exemplar: dict[str, str] | None = None) -> None:
        """One value, with a value for each label."""
        found = self._series.get(labels)
        if found is None:
            if len(labels) != len(self.metric.labels):
                raise ValueError(f"{self.metric.name} has the labels {self.metric.labels}, and {labels} were given")
            found = self._series[labels] = Observations(self.metric.buckets)
        found.observe(value, exemplar, self._wall_seconds)

    def series(self) -> list[tuple[tuple[str, ...], Observations]]:
        """Label values and observations, in the order in which they first came."""
        return list(self._series.items())

    def describe(self) -> Iterable[Family]:
        """For the registry, which asks for names."""
        return [Family(self.metric.name, self.metric.help, "histogram")]

    def collect(self) -> Iterable[Family]:
        """For the registry and whatever reads it."""
        return [HistogramFamily(self)]


class HistogramFamily(Family):
    """A histogram as a registry hands it out; its samples are made when they are asked for."""

    def __init__(self, histogram: Histogram) -> None:
        super().__init__(histogram.metric.name, histogram.metric.help, "histogram")
        self.histogram = histogram

    @property
    def samples(self) -> list[Sample]:
        """As prometheus_client has them."""
        name, names = self.histogram.metric.name, self.histogram.metric.labels
        found = []
        for values, observed in self.histogram.series():
            labels = dict(zip(names, values, strict=True))
            exemplars = dict(observed.exemplars)
            reached = 0
            for number, (edge, reached) in enumerate(
                zip(self.histogram.edges, accumulate(list(observed.counts)), strict=True)
            ):
                found.append(
                    Sample(f"{name}_bucket", labels | {"le": edge}, float(reached), None, exemplars.get(number))
                )
            found.append(Sample(f"{name}_count", labels, float(reached), None, None))
            found.append(Sample(f"{name}_sum", labels, observed.total, None, None))
        return found

    @samples.setter
    def samples(self, value: Any) -> None:
        """The base class begins with none."""


def number_text(value: float) -> str:
    """A number as Prometheus writes it."""
    text: str = floatToGoString(value)  # type: ignore[no-untyped-call]
    return text
