"""The prometheus_client objects of the metrics catalogue."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info

from tracing.metrics import Metric

Instrument = Counter | Gauge | Histogram | Info


def build(metrics: tuple[Metric, ...], registry: CollectorRegistry) -> dict[str, Instrument]:
    """The prometheus_client objects of `metrics`, registered and by name."""
    built: dict[str, Instrument] = {}
    for metric in metrics:
        if metric.kind == "histogram":
            instrument: Instrument = Histogram(
                metric.name, metric.help, metric.labels, buckets=metric.buckets, registry=registry
            )
        elif metric.kind == "counter":
            instrument = Counter(metric.name, metric.help, metric.labels, registry=registry)
        elif metric.kind == "gauge":
            instrument = Gauge(metric.name, metric.help, metric.labels, registry=registry)
        else:
            instrument = Info(metric.name.removesuffix("_info"), metric.help, metric.labels, registry=registry)
        built[metric.name] = instrument
    return built
