"""The gateway's metrics, fed from records. One process sees every worker, so the totals are totals."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge

from tracing import semconv
from tracing.instruments import build
from tracing.ledger import Attempt, FirstToken, Ledger, Outcome
from tracing.metrics import GATEWAY, prompt_size_class
from tracing.observer.histogram import Histogram
from tracing.observer.labels import Bounded, status_label
from tracing.observer.rows import Row
from tracing.spans import Span
from tracing.stages import Timeline

MAX_ROUTES = 64
MAX_UPSTREAMS = 32
"""Of histograms by stage and upstream, which are half of a full page: with them it stays under 5 MB."""
MAX_FIRST_TOKENS = 50_000

_ATTEMPT_ERRORS = frozenset({"connect", "first_byte", "idle", "total", "status", "protocol", "cancelled"})
_REJECTIONS = {
    "queue_full": "queue_full",
    "rate_limit_exceeded": "rate_limit",
    "budget_exceeded": "budget",
}
_REJECTED = (Outcome.QUEUE_REJECTED, Outcome.RATE_LIMITED)


class Meters:
    """Counters and histograms of what happened. Gauges of what is now live in `workers.Workers`."""

    def __init__(self, registry: CollectorRegistry, *, trace_is_kept: Callable[[str, str, float], bool]) -> None:
        timed = [metric for metric in GATEWAY if metric.kind == "histogram"]
        self._histograms = {metric.name: Histogram(metric, registry) for metric in timed}
        others = tuple(metric for metric in GATEWAY if metric.kind != "histogram")
        built = build(others, registry)
        self._counters = {name: item for name, item in built.items() if isinstance(item, Counter)}
        self.gauges = {name: item for name, item in built.items() if isinstance(item, Gauge)}
        self._trace_is_kept = trace_is_kept
        self._routes = Bounded(MAX_ROUTES)
        self._upstreams = Bounded(MAX_UPSTREAMS)
        self._teams = Bounded(MAX_ROUTES)
        self._models = Bounded(MAX_ROUTES)
        self._workers = Bounded(MAX_ROUTES)
        # `labels()` of prometheus_client costs more than counting: children are looked up here instead.
        self._children: dict[tuple[str, ...], Counter] = {}
        self._first_tokens: OrderedDict[str, None] = OrderedDict()

    # What happened

    def first_token(self, record: FirstToken) -> None:
        """TTFT, at once. The exemplar is given only when its trace is certain to be kept."""
        ttft = record.ttft_ns / 1e9
        self._first_tokens[record.request_id] = None
        if len(self._first_tokens) > MAX_FIRST_TOKENS:
            self._first_tokens.popitem(last=False)
        kept = self._trace_is_kept(record.trace_id, record.model, ttft)
        route = self._route(record.model, record.upstream, record.surface)
        self._ttft(route, ttft, record.trace_id if kept else "")

    def closed(self, row: Row) -> None:
        """Everything but the stages, which may be known later."""
        ledger, timeline = row.ledger, row.timeline
        route = self._route(ledger.model, ledger.upstream, ledger.surface)
        model, upstream, _ = route
        exemplar = ledger.trace_id if row.kept else ""
        self._inc("tokenline_requests_total", *route, ledger.outcome.value, status_label(ledger.status))
        if timeline.e2e is not None:
            self._observe("gen_ai_server_request_duration_seconds", timeline.e2e, *route, exemplar=exemplar)
        if timeline.ttft is not None and ledger.request_id not in self._first_tokens:
            self._ttft(route, timeline.ttft, exemplar)  # its FirstToken went to an observer that is gone
        self._first_tokens.pop(ledger.request_id, None)
        if timeline.tpot is not None:
            count = "events" if timeline.tpot_count == "events" else "usage"
            self._observe(
                "gen_ai_server_time_per_output_token_seconds", timeline.tpot, *route, count, exemplar=exemplar
            )
        elif ledger.stream and ledger.choices > 1:
            self._inc("tokenline_tpot_skipped_total", "choices")
        if timeline.overhead is not None:
            self._observe("tokenline_gateway_overhead_seconds", timeline.overhead, upstream)
        # An upstream's 429 ends a request alike, but it is not the gateway that refused.
        if ledger.outcome in _REJECTED and not ledger.attempts:
            self._inc("tokenline_rejections_total", _REJECTIONS.get(ledger.error_code or "", ledger.outcome.value))
        for attempt in ledger.attempts:
            self._inc("tokenline_attempts_total", self._upstream(attempt.upstream), _attempt_result(attempt))
        self._tokens(ledger, timeline, model)
        if ledger.client_rtt_ns:
            self._observe("tokenline_client_rtt_seconds", ledger.client_rtt_ns / 1e9)
        if ledger.stream and ledger.first_token_written:
            self._observe("tokenline_client_backpressure_seconds", ledger.backpressure_ns / 1e9)
        if row.kept:
            self._inc("tokenline_traces_kept_total")

    def stages(self, row: Row) -> None:
        """Stage durations of one request, once, when they are known as well as they ever will be."""
        timeline = row.timeline
        upstream = self._upstream(row.ledger.upstream)
        for name, seconds in (*timeline.stages.items(), *timeline.after.items()):
            self._observe("tokenline_stage_duration_seconds", seconds, name, upstream)
        if timeline.ttft is not None and timeline.unaccounted is not None and timeline.placement == "exact":
            self._observe("tokenline_ttft_unaccounted_seconds", abs(timeline.unaccounted), upstream)
        for name in timeline.anomalies:
            self.timing_anomaly(name)

    def loaded(self, wall_ns: int) -> None:
        """The configuration was read at the start; counters of reloads begin at 0."""
        for result in ("ok", "failed"):
            self._inc("tokenline_config_reloads_total", result, amount=0)
        self.gauges["tokenline_config_last_success_timestamp_seconds"].set(wall_ns / 1e9)

    def reloaded(self, is_ok: bool, wall_ns: int) -> None:
        """The configuration was read again."""
        self._inc("tokenline_config_reloads_total", "ok" if is_ok else "failed")
        if is_ok:
            self.gauges["tokenline_config_last_success_timestamp_seconds"].set(wall_ns / 1e9)

    def expect(self, models: Iterable[str]) -> None:
        """Begins what alerts are judged by at 0 for these models: a rate does not see a counter's first value, and when
        an engine hangs all requests may turn bad between two scrapes."""
        known = sorted(set(models))
        for model in known if len(known) <= MAX_ROUTES else ():
            for objective in ("ttft", "tpot"):
                self._count_slo(self._model(model), objective, good=True, amount=0)

    def slo(self, model: str, objective: str, good: bool) -> None:
        """A request met the objective `ttft` or `tpot`, or did not."""
        self._count_slo(self._model(model), objective, good=good, amount=1)

    def _count_slo(self, model: str, objective: str, *, good: bool, amount: int) -> None:
        names = ("good", "bad") if good else ("bad", "good")
        self._inc("tokenline_slo_requests_total", model, objective, names[0], amount=amount)
        if ("tokenline_slo_requests_total", model, objective, names[1]) not in self._children:
            self._inc("tokenline_slo_requests_total", model, objective, names[1], amount=0)

    def band_request(self, model: str, band: str) -> None:
        self._inc("tokenline_band_requests_total", model, band)

    def band_seconds(self, model: str, band: str, stage: str, seconds: float) -> None:
        self._inc("tokenline_band_stage_seconds_total", model, band, stage, amount=seconds)

    def loop_lags(self, worker: int, lags_ns: Iterable[int]) -> None:
        (name,) = self._workers.keep(str(worker))
        for lag_ns in lags_ns:
            self._observe("tokenline_event_loop_lag_seconds", lag_ns / 1e9, name)

    def left_early(self, ledger: Ledger, spans: Iterable[Span]) -> None:
        """How soon work stopped for a client that had gone; `spans` are all that the engine sent of the request.

        From the client's going to the upstream's connection closed by the gateway's clock, and from then to slot and
        pages freed by the engine's, where it says so: durations of two clocks, added and never subtracted.
        """
        self.wasted(ledger.upstream, spans := list(spans))
        if ledger.outcome is not Outcome.CLIENT_CANCELLED or not ledger.client_gone or not ledger.attempts:
            return
        last = ledger.attempts[-1]
        if last.request_sent and last.end >= ledger.client_gone:
            freed = [s for span in spans if isinstance(s := span.attributes.get(semconv.ABORT_SECONDS), int | float)]
            seconds = (last.end - ledger.client_gone) / 1e9 + max(freed, default=0.0)
            self._observe("tokenline_abort_propagation_seconds", seconds, self._upstream(ledger.upstream))

    def wasted(self, upstream: str, spans: Iterable[Span]) -> None:
        """Tokens that engines made for clients that had gone."""
        for span in spans:
            tokens = span.attributes.get(semconv.WASTED_TOKENS)
            if isinstance(tokens, int) and tokens > 0:
                self._inc("tokenline_wasted_tokens_total", self._upstream(upstream), amount=tokens)

    def timing_anomaly(self, kind: str, count: int = 1) -> None:
        self._inc("tokenline_timing_anomalies_total", kind, amount=count)

    def traces_dropped(self, reason: str, count: int) -> None:
        """Called from any thread."""
        self._inc("tokenline_traces_dropped_total", reason, amount=count)

    def ledgers_dropped(self, count: int) -> None:
        self._inc("tokenline_ledgers_dropped_total", amount=count)

    def spans_received(self, result: str, count: int) -> None:
        """`overloaded` counts bodies, which nobody has looked into."""
        self._inc("tokenline_spans_received_total", result, amount=count)

    # How it is written down

    def _ttft(self, route: tuple[str, ...], seconds: float, exemplar: str) -> None:
        self._observe("gen_ai_server_time_to_first_token_seconds", seconds, *route, exemplar=exemplar)

    def _tokens(self, ledger: Ledger, timeline: Timeline, model: str) -> None:
        usage = ledger.usage
        if usage.source != "usage":
            return  # counted events are not tokens
        team = self._teams.keep(ledger.team or "none")[0]
        for direction, tokens in (
            ("input", usage.input_tokens),
            ("cached", usage.cached_tokens),
            ("output", usage.output_tokens),
            ("reasoning", usage.reasoning_tokens),
        ):
            if tokens is not None and tokens > 0:
                self._inc("tokenline_tokens_total", direction, model, team, amount=tokens)
        if usage.input_tokens is not None:
            self._observe("tokenline_prompt_tokens", usage.input_tokens, model)
            if timeline.ttft is not None:
                size = prompt_size_class(usage.input_tokens)
                self._observe("tokenline_ttft_by_prompt_size_seconds", timeline.ttft, model, size)
        if usage.output_tokens is not None:
            self._observe("tokenline_output_tokens", usage.output_tokens, model)

    def _route(self, model: str, upstream: str, surface: str) -> tuple[str, ...]:
        return self._routes.keep(model, upstream, surface)

    def _model(self, model: str) -> str:
        return self._models.keep(model)[0]

    def _upstream(self, upstream: str) -> str:
        return self._upstreams.keep(upstream)[0]

    def _inc(self, name: str, *labels: str, amount: float = 1) -> None:
        child = self._children.get((name, *labels))
        if child is None:
            metric = self._counters[name]
            child = self._children[(name, *labels)] = metric.labels(*labels) if labels else metric
        child.inc(amount)

    def _observe(self, name: str, value: float, *labels: str, exemplar: str = "") -> None:
        self._histograms[name].observe(value, labels, {"trace_id": exemplar} if exemplar else None)


def _attempt_result(attempt: Attempt) -> str:
    if attempt.error is not None:
        return attempt.error if attempt.error in _ATTEMPT_ERRORS else "other"
    return "ok" if attempt.status < 400 else "status"
