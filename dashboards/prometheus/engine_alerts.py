"""Alerts on the engine: what makes users wait before they say so."""

from __future__ import annotations

from dashboards.prometheus.alerts import MIN_REQUESTS, Alert
from dashboards.prometheus.promql import Windows, increase, quantile, rate, selected, summed
from dashboards.sources import JOB
from settings.schema import Settings

HEADROOM = 0.2
GAP_SHARE = 0.2
BUSY_SHARE = 0.1
MIN_LOOKED_UP_TOKENS = 10_000
_E = "tokenline_engine_"
_UID = "tokenline-engine"


def engine_alerts(settings: Settings, windows: Windows) -> list[Alert]:
    """Of our own engine; none where another serves."""
    if settings.engine.backend != "tokenline":
        return []
    return [
        _queue_wait(settings, windows),
        _kv_headroom(),
        _cache_hits(windows),
        _token_gap(windows),
        _silent(),
    ]


def _queue_wait(settings: Settings, windows: Windows) -> Alert:
    window = windows(300)
    metric = f"{_E}request_queue_time_seconds"
    signal = quantile(0.95, metric, window, by=("model",))
    limit = settings.scheduler.queue_warn_ms / 1e3
    return Alert(
        name="TokenlineEngineQueueWait",
        signal=signal,
        expr=f"({signal} > {limit:g})\nand ({summed(increase(f'{metric}_count', window), 'model')} >= {MIN_REQUESTS})",
        hold_seconds=300,
        severity="ticket",
        summary="P95 of the wait in the engine's queue for {{ $labels.model }} is {{ $value | humanizeDuration }}",
        description=f"More than scheduler.queue_warn_ms ({limit:g} s): more requests come than the engine has slots, "
        "pages or speed for.",
        dashboard=_UID,
    )


def _kv_headroom() -> Alert:
    signal = f"1 - {_E}kv_cache_usage_ratio"
    return Alert(
        name="TokenlineKvHeadroomLow",
        signal=signal,
        expr=f"({signal}) < {HEADROOM:g}",
        hold_seconds=300,
        severity="ticket",
        summary="Only {{ $value | humanizePercentage }} of the KV cache of {{ $labels.model }} is free",
        description="Below 20 % a few long requests are enough for others to wait or to be preempted.",
        dashboard=_UID,
    )


def _cache_hits(windows: Windows) -> Alert:
    def share(window: str) -> str:
        hits = summed(rate(f"{_E}prefix_cache_hits_total", window), "model")
        return f"{hits} / {summed(rate(f'{_E}prefix_cache_queries_total', window), 'model')}"

    now, usual = share(windows(900)), share(windows(21600))
    looked_up = summed(increase(f"{_E}prefix_cache_queries_total", windows(900)), "model")
    return Alert(
        name="TokenlineCacheHitCollapse",
        signal=now,
        expr=f"({now} < 0.5 * ({usual}))\nand ({usual} > 0.2)\nand ({looked_up} >= {MIN_LOOKED_UP_TOKENS})",
        hold_seconds=300,
        severity="ticket",
        summary="The prefix cache of {{ $labels.model }} hits {{ $value | humanizePercentage }} of prompt tokens, less "
        "than half of what is usual",
        description="Compared with the last 6 hours. Prompts that began alike no longer do, or go to other replicas, "
        "or their pages are evicted: prefill takes longer for everybody.",
        dashboard=_UID,
    )


def _token_gap(windows: Windows) -> Alert:
    window = windows(300)
    gap = summed(rate(f"{_E}token_gap_seconds_sum", window), "model")
    forward = summed(rate(f"{_E}forward_seconds_total", window), "model")
    signal = f"{gap} / ({gap} + {forward})"
    return Alert(
        name="TokenlineTokenGapHigh",
        signal=signal,
        expr=f"({signal} > {GAP_SHARE:g})\nand ({forward} > {BUSY_SHARE:g})",
        hold_seconds=600,
        severity="ticket",
        summary="The device of {{ $labels.model }} idles {{ $value | humanizePercentage }} of the time between steps",
        description="While requests run or wait: the host doesn't keep up (scheduling, detokenizing, other load on its "
        "CPUs), or the overlap is turned off.",
        dashboard=_UID,
    )


def _silent() -> Alert:
    metric = f"{_E}num_requests_running"
    gateway = selected("up", f'job="{JOB}"')
    return Alert(
        name="TokenlineEngineSilent",
        signal=metric,
        expr=f"absent({metric})\nand on () (max({gateway}) == 1)",
        hold_seconds=60,
        severity="page",
        summary="The engine's metrics are gone while the gateway answers",
        description="The engine has died, hangs or restarts.",
        dashboard=_UID,
        scope="all",
    )
