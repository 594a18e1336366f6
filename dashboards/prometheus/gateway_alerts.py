"""Alerts on the gateway, its upstreams and its own measurements."""

from __future__ import annotations

from dashboards.prometheus.alerts import MIN_REQUESTS, Alert
from dashboards.prometheus.promql import Windows, increase, or_zero, quantile, rate, selected, summed
from dashboards.sources import JOB

ERROR_SHARE = 0.05
UNACCOUNTED_SHARE = 0.05
LAG_SECONDS = 0.05
FAILED = 'outcome=~"upstream_error|upstream_timeout|gateway_error|queue_rejected"'
JUDGED = 'outcome!~"client_error|auth_error|rate_limited|client_cancelled"'
"""What clients did themselves is no error of ours."""
_TTFT = "gen_ai_server_time_to_first_token_seconds"
_UP = selected("up", f'job="{JOB}"')


def gateway_alerts(windows: Windows) -> list[Alert]:
    """All of them; whatever serves behind."""
    return [
        _error_ratio(windows),
        _upstream_down(),
        _no_upstream(),
        _limits_degraded(),
        _unaccounted(windows),
        _loop_lag(windows),
        _records_lost(windows),
        _not_reloaded(windows),
        _no_data(),
    ]


def _error_ratio(windows: Windows) -> Alert:
    window = windows(300)
    every = summed(rate("tokenline_requests_total", window, JUDGED), "model")
    failed = summed(rate("tokenline_requests_total", window, FAILED), "model")
    signal = f"{or_zero(failed, every)} / ({every} > 0)"
    return Alert(
        name="TokenlineErrorRatioHigh",
        signal=signal,
        expr=f"({signal} > {ERROR_SHARE:g})\n"
        f"and ({summed(increase('tokenline_requests_total', window, JUDGED), 'model')} >= {MIN_REQUESTS})",
        hold_seconds=120,
        severity="page",
        summary="{{ $value | humanizePercentage }} of requests to {{ $labels.model }} fail",
        description="Errors and timeouts of upstreams, faults of the gateway, no room. Errors of clients, keys and "
        "limits are not counted.",
        dashboard="tokenline-overview",
    )


def _upstream_down() -> Alert:
    signal = "min by (upstream) (tokenline_upstream_up)"
    return Alert(
        name="TokenlineUpstreamDown",
        signal=signal,
        expr=f"{signal} == 0",
        hold_seconds=60,
        severity="ticket",
        summary="Upstream {{ $labels.upstream }} fails its health checks",
        description="Requests go to its fallbacks, where the model has some.",
        dashboard="tokenline-overview",
        scope="all",
    )


def _no_upstream() -> Alert:
    signal = "max(tokenline_upstream_up)"
    return Alert(
        name="TokenlineNoUpstream",
        signal=signal,
        expr=f"{signal} == 0",
        hold_seconds=30,
        severity="page",
        summary="No upstream passes its health check",
        description="Nothing can be answered.",
        dashboard="tokenline-overview",
        scope="all",
    )


def _limits_degraded() -> Alert:
    return Alert(
        name="TokenlineLimitsDegraded",
        signal="max by (instance) (tokenline_limits_degraded)",
        expr="max by (instance) (tokenline_limits_degraded) == 1",
        hold_seconds=120,
        severity="ticket",
        summary="{{ $labels.instance }} can't ask Redis (or its workers share no memory): limits are not shared",
        description="Each gateway limits by itself (or refuses, redis.on_outage), so keys may use more than their "
        "plans allow.",
        dashboard="tokenline-tenants",
        scope="all",
    )


def _unaccounted(windows: Windows) -> Alert:
    window = windows(300)
    lost = summed(rate("tokenline_ttft_unaccounted_seconds_sum", window), "upstream")
    ttft = summed(rate(f"{_TTFT}_sum", window), "upstream")
    count = summed(increase("tokenline_ttft_unaccounted_seconds_count", window), "upstream")
    signal = f"{lost} / ({ttft} > 0)"
    return Alert(
        name="TokenlineUnaccountedTime",
        signal=signal,
        expr=f"({signal} > {UNACCOUNTED_SHARE:g})\nand ({count} >= {MIN_REQUESTS})",
        hold_seconds=300,
        severity="ticket",
        summary="{{ $value | humanizePercentage }} of TTFT at {{ $labels.upstream }} lies in no stage",
        description="The timeline doesn't close: stages of the same host should sum to TTFT.",
        dashboard="tokenline-time",
        scope="all",
    )


def _loop_lag(windows: Windows) -> Alert:
    signal = quantile(0.99, "tokenline_event_loop_lag_seconds", windows(300), by=("instance", "worker"))
    return Alert(
        name="TokenlineEventLoopLag",
        signal=signal,
        expr=f"{signal} > {LAG_SECONDS:g}",
        hold_seconds=300,
        severity="ticket",
        summary="The event loop of worker {{ $labels.worker }} runs {{ $value | humanizeDuration }} late (P99)",
        description="The gateway itself adds this to TTFT and to every token: too few workers or CPUs for the traffic.",
        dashboard="tokenline-time",
        scope="all",
    )


def _records_lost(windows: Windows) -> Alert:
    window = windows(300)
    ledgers = summed(increase("tokenline_ledgers_dropped_total", window), "instance")
    # Spans of a trace that no request here has are another gateway's: an engine may serve several.
    ours = 'reason!="unknown_trace"'
    traces = summed(increase("tokenline_traces_dropped_total", window, ours), "instance")
    signal = f"{ledgers} + {or_zero(traces, ledgers)}"
    return Alert(
        name="TokenlineRecordsLost",
        signal=signal,
        expr=f"{signal} > 0",
        hold_seconds=300,
        severity="ticket",
        summary='{{ $labels.instance }} lost {{ $value | printf "%.0f" }} records or traces in 5 minutes',
        description="Requests were served all the same; metrics and `tokenline why` lack some of them.",
        dashboard="tokenline-time",
        scope="all",
    )


def _not_reloaded(windows: Windows) -> Alert:
    window = windows(900)
    name = "tokenline_config_reloads_total"
    failed, taken = (summed(increase(name, window, f'result="{result}"'), "instance") for result in ("failed", "ok"))
    return Alert(
        name="TokenlineConfigNotReloaded",
        signal=failed,
        expr=f"({failed} > 0)\nunless ({taken} > 0)",
        hold_seconds=60,
        severity="ticket",
        summary="{{ $labels.instance }} could not take its new configuration",
        description="What was in force before stays so; the next start will fail on it, too.",
        dashboard="tokenline-overview",
        scope="all",
    )


def _no_data() -> Alert:
    return Alert(
        name="TokenlineNoData",
        signal=_UP,
        expr=f"({_UP} == 0)\nor absent({_UP})",
        hold_seconds=60,
        severity="page",
        summary="No metrics from {{ with $labels.instance }}{{ . }}{{ else }}any gateway{{ end }}",
        description="The observer's listener can't be scraped: nobody would notice anything else.",
        dashboard="tokenline-overview",
        scope="all",
    )
