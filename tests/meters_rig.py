"""Meters on a registry of their own, and ways to read them."""

from __future__ import annotations

from typing import Any

from ledgers import HERE
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.exposition import generate_latest

from protocol.timings import HostIdentity
from settings.schema import SloSettings
from tracing.clock import Clock, FakeClock
from tracing.ledger import FirstToken, Ledger
from tracing.observer.keep import KeepRule, Slowest
from tracing.observer.meters import Meters
from tracing.observer.rows import Row
from tracing.observer.slo import Objectives
from tracing.stages import timeline_of


def keep_rule(slo: dict[str, SloSettings], share: float, *, slowest: int = 0, clock: Clock | None = None) -> KeepRule:
    return KeepRule(Objectives(slo), share, Slowest(clock or FakeClock(), count=slowest, window_seconds=60))


class Rig:
    """Meters and a way to read them."""

    def __init__(self, share: float = 1.0) -> None:
        self.registry = CollectorRegistry()
        self.keep = keep_rule({"default": SloSettings(ttft_ms=1000, tpot_ms=100)}, share)
        self.meters = Meters(self.registry, trace_is_kept=self.keep.keeps_for_sure)

    def close(self, made: Ledger, host: HostIdentity = HERE) -> Row:
        timeline = timeline_of(made, host)
        row = Row(made, timeline, host, self.keep.keeps(made, timeline))
        self.meters.closed(row)
        self.meters.stages(row)
        return row

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)

    def series(self, name: str) -> dict[tuple[str, ...], float]:
        return {
            tuple(sample.labels.values()): sample.value
            for family in self.registry.collect()
            for sample in family.samples
            if sample.name == name
        }

    def page(self) -> str:
        return generate_latest(self.registry).decode()


def first_token(made: Ledger, **changes: Any) -> FirstToken:
    ttft_ns = made.first_token_written - made.ingress
    fields: dict[str, Any] = {
        "request_id": made.request_id,
        "worker": 0,
        "model": made.model,
        "upstream": made.upstream,
        "surface": made.surface,
        "ttft_ns": ttft_ns,
        "trace_id": made.trace_id,
    }
    return FirstToken(**(fields | changes))
