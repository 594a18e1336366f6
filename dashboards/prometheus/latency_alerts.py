"""Alerts on what users feel: objectives missed, percentiles over them, a request that waits and waits."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from dashboards.prometheus.alerts import MIN_REQUESTS, Alert, Severity
from dashboards.prometheus.promql import Windows, increase, selected, summed
from dashboards.prometheus.recording import FIGURES, SLO_WINDOWS, count_name, good_ratio_name, percentile_name
from dashboards.sources import objectives
from settings.schema import Settings, SloSettings

MIN_BAD = 5
WAITING_TIMES = 5
"""A request without a first token is reported once it has waited this many times the TTFT objective."""

PERCENTILES: tuple[tuple[str, Severity], ...] = (("p95", "page"), ("p99", "ticket"))


class Burn(msgspec.Struct, frozen=True):
    """How fast the budget of bad requests is used up, seen in two windows at once: the long one says that it matters,
    the short one that it still goes on. After "The Site Reliability Workbook", chapter 5, for a budget of 30 days."""

    name: str
    long: str
    short: str
    factor: float
    hold_seconds: float
    severity: Severity
    used: str


BURNS = (
    Burn("TokenlineSloBurnFast", "1h", "5m", 14.4, 60, "page", "2 % of a month's budget in an hour"),
    Burn("TokenlineSloBurnMedium", "6h", "30m", 6, 120, "page", "5 % of a month's budget in six hours"),
    Burn("TokenlineSloBurnSlow", "1d", "2h", 3, 900, "ticket", "10 % of a month's budget in a day"),
    Burn("TokenlineSloBurnCreeping", "3d", "6h", 1, 3600, "ticket", "10 % of a month's budget in three days"),
)


def latency_alerts(settings: Settings, windows: Windows) -> list[Alert]:
    """Made from [slo]."""
    return [
        *(_burn(settings, windows, burn) for burn in BURNS),
        *(
            _percentile(settings, figure, quantile, severity)
            for figure in ("ttft", "tpot")
            for quantile, severity in PERCENTILES
        ),
        _waiting(settings),
    ]


def _burn(settings: Settings, windows: Windows, burn: Burn) -> Alert:
    long = windows(SLO_WINDOWS[burn.long])
    enough = summed(increase("tokenline_slo_requests_total", long), "model", "slo")
    bad = summed(increase("tokenline_slo_requests_total", long, 'result="bad"'), "model", "slo")

    def over(selector: str, slo: SloSettings) -> str:
        least = f"{max(0.0, 1 - burn.factor * (1 - slo.target)):.6g}"
        if burn.factor * (1 - slo.target) >= 1:
            least = "0.001"  # no share of bad requests burns that fast: all of them bad is the worst there is
        return (
            f"({selected(good_ratio_name(burn.long), selector)} < {least}"
            f" and {selected(good_ratio_name(burn.short), selector)} < {least})"
        )

    return Alert(
        name=burn.name,
        signal=good_ratio_name(burn.long),
        expr=f"({_each(settings, over)})\nand ({enough} >= {MIN_REQUESTS})\nand ({bad} >= {MIN_BAD})",
        hold_seconds=burn.hold_seconds,
        severity=burn.severity,
        summary="{{ $labels.model }}: {{ $value | humanizePercentage }} of requests met the {{ $labels.slo }} "
        f"objective in {burn.long}",
        description=f"Bad requests use up {burn.used}, and did so in the last {burn.short} too. {_told(settings)}",
        dashboard="tokenline-overview",
    )


def _percentile(settings: Settings, figure: str, quantile: str, severity: Severity) -> Alert:
    name = percentile_name(figure, quantile)
    # A P99 of fewer than 100 samples is their largest.
    enough = MIN_REQUESTS if quantile == "p95" else 100

    def over(selector: str, slo: SloSettings) -> str:
        return f"{selected(name, selector)} > {_seconds(slo, figure):g}"

    return Alert(
        name=f"Tokenline{figure.capitalize()}{quantile.upper()}High",
        signal=name,
        expr=f"({_each(settings, over)})\nand ({count_name(figure)} >= {enough})",
        hold_seconds=300,
        severity=severity,
        summary=f"{figure.upper()} {quantile.upper()} of "
        "{{ $labels.model }} is {{ $value | humanizeDuration }}",
        description=f"Over 5 minutes and at least {enough} samples ({FIGURES[figure]}). {_told(settings)}",
        dashboard="tokenline-overview",
    )


def _waiting(settings: Settings) -> Alert:
    metric = "tokenline_oldest_waiting_seconds"

    def over(selector: str, slo: SloSettings) -> str:
        return f"max by (model) ({selected(metric, selector)}) > {WAITING_TIMES * slo.ttft_ms / 1e3:g}"

    return Alert(
        name="TokenlineRequestWaiting",
        signal=f"max by (model) ({metric})",
        expr=_each(settings, over),
        hold_seconds=15,
        severity="page",
        summary="A request to {{ $labels.model }} has waited {{ $value | humanizeDuration }} for its first token",
        description=f"More than {WAITING_TIMES} times the objective. It needs no traffic and no request that ends: "
        f"a hung engine is found by this. {_told(settings)}",
        dashboard="tokenline-time",
    )


def _each(settings: Settings, over: Callable[[str, SloSettings], str]) -> str:
    """One comparison for each model with objectives of its own, and one for all others."""
    return "\n or ".join(over(selector, slo) for selector, slo in objectives(settings))


def _seconds(slo: SloSettings, figure: str) -> float:
    return (slo.ttft_ms if figure == "ttft" else slo.tpot_ms) / 1e3


def _told(settings: Settings) -> str:
    """The objectives in words."""
    words = (
        f"{name}: TTFT {slo.ttft_ms:g} ms, TPOT {slo.tpot_ms:g} ms, {slo.target * 100:g} % of requests"
        for name, slo in settings.slo.items()
    )
    return "Objectives: " + "; ".join(words) + "."
