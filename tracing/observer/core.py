"""The observer's heart: what each record and span sets in motion. No sockets here; time is injected."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable

from prometheus_client import CollectorRegistry

from settings.schema import Settings
from tracing.clock import Clock, host_identity
from tracing.ledger import Admitted, Closed, FirstToken, Ledger, Record, WorkerState
from tracing.observer.access_log import AccessLog
from tracing.observer.adapters import evidence_of_header, retold, stand_ins
from tracing.observer.bands import Bands
from tracing.observer.baseline import Baselines
from tracing.observer.baseline_file import BaselineFile
from tracing.observer.export import Exporter
from tracing.observer.join import Join
from tracing.observer.keep import KeepRule, Slowest
from tracing.observer.meters import MAX_ROUTES, Meters
from tracing.observer.rows import Row
from tracing.observer.slo import Objectives, SloCounter
from tracing.observer.store import AddLateSpans, AddRow, AddSpans, ReplaceRow, Store
from tracing.observer.usage import UsageBook
from tracing.observer.verdict import Judge
from tracing.observer.waiting import Waiting
from tracing.observer.workers import Workers
from tracing.spans import Span, gateway_spans
from tracing.stages import timeline_of

log = logging.getLogger("tokenline.observer")


class Observer:
    """Takes records and spans; feeds metrics, join, store, export and access log. Also the join's sink."""

    def __init__(
        self, settings: Settings, clock: Clock, registry: CollectorRegistry, exporter: Exporter | None
    ) -> None:
        self.settings = settings
        self.clock = clock
        self._host = host_identity()
        self._exporter = exporter
        self._objectives = objectives = Objectives(settings.slo)
        tracing = settings.tracing
        slowest = Slowest(clock, count=tracing.keep_slowest, window_seconds=tracing.keep_window_seconds)
        self._keep = KeepRule(objectives, tracing.sample_ratio, slowest)
        self.meters = Meters(registry, trace_is_kept=self._keep.keeps_for_sure)
        self.meters.expect(settings.public_models)
        self.meters.loaded(clock.wall_ns())
        if exporter is not None:
            exporter.count_dropped(self.meters.traces_dropped)
        self._waiting = Waiting()
        self.workers = Workers(
            clock,
            self.meters.gauges,
            max_names=MAX_ROUTES,
            dropped=self.meters.ledgers_dropped,
            lagged=self.meters.loop_lags,
            waiting=self._waiting,
        )
        self._slo = SloCounter(objectives, clock, self.meters.slo)
        self._bands = Bands(clock, self.meters.band_request, self.meters.band_seconds)
        self.baselines = Baselines()
        self.baseline_file = BaselineFile(settings.state_dir / "baselines.msgpack", self.baselines)
        self.join = Join(self, clock, wait_ms=settings.tracing.join_wait_ms)
        self.store = Store(
            settings.traces_path,
            max_rows=settings.tracing.store_max_rows,
            max_traces=settings.tracing.store_max_traces,
            max_age_seconds=settings.tracing.store_max_age_hours * 3600,
            clock=clock,
            dropped=self.meters.traces_dropped,
            late_stored=self._late_stored,
        )
        writes_access_log = settings.logging.level in ("debug", "info")
        self.usage = UsageBook(settings.usage_path, clock)
        self.access_log = AccessLog(settings.state_dir / "access.log") if writes_access_log else None

    # What comes in

    def take_records(self, records: list[Record]) -> None:
        """One frame of a relay worker."""
        for record in records:
            match record:
                case Closed(ledger):
                    self._close(ledger)
                case FirstToken():
                    self.meters.first_token(record)
                    self._slo.first_token(record)
                    self._waiting.answered(record.request_id)
                case WorkerState():
                    self.workers.report(record)
                    self._slo.worker(record)
                case Admitted():
                    self._slo.admitted(record)
                    self._waiting.admitted(record)

    def take_spans(self, spans: Iterable[Span]) -> None:
        """Engine spans from the OTLP receiver."""
        self.join.spans(spans)

    def upstream_health(self, upstream: str, is_up: bool | None) -> None:
        """The result of a health check; None: it is not checked any more."""
        gauge = self.meters.gauges["tokenline_upstream_up"]
        if is_up is not None:
            gauge.labels(upstream).set(is_up)
            return
        with contextlib.suppress(KeyError):
            gauge.remove(upstream)

    def reload(self, settings: Settings) -> None:
        """Other objectives, models and upstreams from now on. What was counted stays counted."""
        self.settings = settings
        self._objectives.replace(settings.slo)
        self.meters.expect(settings.public_models)
        self.workers.expect(settings.upstream_names)

    def tick(self) -> None:
        """Called a few times a second."""
        self.join.tick()
        self.workers.publish()
        self._slo.tick()

    def judge(self) -> Judge:
        """Judges requests against what is usual now."""
        return Judge(self.baselines, self.settings, self.clock.wall_ns())

    def missing(self) -> list[str]:
        """What keeps the observer from being ready; empty when it is."""
        found = []
        if not self.store.is_open:
            found.append("the store is not open")
        if not self.workers.live():
            found.append("no relay worker has reported in the last 5 seconds")
        return found

    def _close(self, ledger: Ledger) -> None:
        self._waiting.answered(ledger.request_id)
        host = self.workers.host_of(ledger.worker, self._host)
        timeline = timeline_of(ledger, host)
        row = Row(ledger, timeline, host, self._keep.keeps(ledger, timeline))
        if ledger.timings is None and ledger.attempts:
            evidence = evidence_of_header(ledger.attempts[-1].server_timing)
            row = retold(row, evidence) if evidence is not None else row
        self.meters.closed(row)
        self._slo.closed(ledger, timeline)
        self.usage.add(ledger)
        self.store.put(AddRow(row))
        if self.access_log is not None:
            self.access_log.add(row)
        self.join.closed(row)

    # What the join found out (JoinSink)

    def timed(self, row: Row, *, changed: bool) -> None:
        self.meters.stages(row)
        self._slo.told(row.ledger, row.timeline)
        self._bands.told(row)
        self.baselines.add(row)
        if changed:
            self.store.put(ReplaceRow(row))

    def completed(self, row: Row, spans: list[Span]) -> None:
        self.meters.left_early(row.ledger, spans)
        if not row.kept:
            return
        derived: list[Span] = []
        if self._exporter is not None:
            derived = stand_ins(row, spans)
            self._export([*gateway_spans(row.ledger, row.timeline), *spans, *derived])
        self.store.put(AddSpans(row.ledger.trace_id, spans, stand_ins_left=bool(derived)))

    def late(self, trace_id: str, spans: list[Span], *, kept: bool, upstream: str) -> None:
        self.meters.wasted(upstream, spans)
        if kept:  # the store knows whether stand-ins were exported in their place
            self.store.put(AddLateSpans(trace_id, spans))

    def overflowed(self, span: Span) -> None:
        self.meters.traces_dropped("spans_over_limit", 1)

    def orphaned(self, trace_id: str, spans: list[Span]) -> None:
        self.store.put(AddLateSpans(trace_id, spans))

    def _late_stored(self, spans: list[Span], stand_ins_left: bool) -> None:
        """On the store's thread. Where stand-ins have left for the backend, the spans too would show all twice."""
        if stand_ins_left:
            self.meters.traces_dropped("late_spans_not_exported", 1)
        else:
            self._export(spans)

    def _export(self, spans: list[Span]) -> None:
        if self._exporter is not None:
            self._exporter.export(spans)
