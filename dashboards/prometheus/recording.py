"""Recording rules, named level:metric:operations: percentiles, shares of good requests, excess of the slow band."""

from __future__ import annotations

from typing import Any

from dashboards.prometheus.promql import Windows, increase, or_zero, quantile, rate, summed

QUANTILES = (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))
FIGURES = {
    "ttft": "gen_ai_server_time_to_first_token_seconds",
    "tpot": "gen_ai_server_time_per_output_token_seconds",
    "e2e": "gen_ai_server_request_duration_seconds",
}
LEVELS = (("model",), ("model", "upstream"))
QUICK_SECONDS = 300
SLO_WINDOWS = {"5m": 300, "30m": 1800, "1h": 3600, "2h": 7200, "6h": 21600, "1d": 86400, "3d": 259200}
SLOW_BANDS = 'band=~"p95-99|p99[+]"'
MEDIAN_BAND = 'band="p0-50"'
SLOW_EXCESS = "model_stage:tokenline_band_stage_seconds:slow_excess10m"
"""Seconds that a request of the slow bands (the slowest 5 %) spent in a stage beyond what one of the fast half did."""

Group = dict[str, Any]


def percentile_name(figure: str, quantile_name: str, level: tuple[str, ...] = ("model",)) -> str:
    """The series of a percentile over the last 5 minutes."""
    return f"{'_'.join(level)}:{FIGURES[figure]}:{quantile_name}_rate5m"


def count_name(figure: str) -> str:
    """How many samples the percentiles of a model are of."""
    return f"model:{FIGURES[figure]}_count:increase5m"


def good_ratio_name(window: str) -> str:
    """Share of good requests of a model and objective in a window of SLO_WINDOWS."""
    return f"model_slo:tokenline_slo_requests:good_ratio{window}"


def recording_groups(windows: Windows) -> list[Group]:
    """All groups."""
    return [
        {"name": "tokenline-latency", "rules": _latency(windows)},
        {"name": "tokenline-slo", "rules": _good_ratios(windows)},
        {"name": "tokenline-bands", "rules": _bands(windows)},
    ]


def _latency(windows: Windows) -> list[dict[str, str]]:
    quick = windows(QUICK_SECONDS)
    percentiles = [
        {"record": percentile_name(figure, name, level), "expr": quantile(q, metric, quick, by=level)}
        for figure, metric in FIGURES.items()
        for level in LEVELS
        for name, q in QUANTILES
    ]
    counts = [
        {"record": count_name(figure), "expr": summed(increase(f"{metric}_count", quick), "model")}
        for figure, metric in FIGURES.items()
    ]
    return percentiles + counts


def _good_ratios(windows: Windows) -> list[dict[str, str]]:
    rules = []
    for name, seconds in SLO_WINDOWS.items():
        window = windows(seconds)
        every = summed(rate("tokenline_slo_requests_total", window), "model", "slo")
        bad = summed(rate("tokenline_slo_requests_total", window, 'result="bad"'), "model", "slo")
        # Counted by the bad: when nothing is good there may be no series of good ones.
        rules.append({"record": good_ratio_name(name), "expr": f"1 - {or_zero(bad, every)} / ({every} > 0)"})
    return rules


def _bands(windows: Windows) -> list[dict[str, str]]:
    slow = _mean_seconds(SLOW_BANDS, windows(600))
    # An hour: when everything has become slow, the fast half of before is what it is compared with.
    usual = _mean_seconds(MEDIAN_BAND, windows(3600))
    return [{"record": SLOW_EXCESS, "expr": f"{slow}\n- {or_zero(usual, slow)}"}]


def _mean_seconds(bands: str, window: str) -> str:
    """Seconds of a request of these bands in each stage."""
    seconds = summed(rate("tokenline_band_stage_seconds_total", window, bands), "model", "stage")
    requests = summed(rate("tokenline_band_requests_total", window, bands), "model")
    return f"({seconds} / on (model) group_left () ({requests} > 0))"
