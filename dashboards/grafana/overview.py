"""Overview: do users suffer, since when, and who."""

from __future__ import annotations

from dashboards.grafana.board import MODEL, ROUTE, UPSTREAM, Board
from dashboards.grafana.panel import Panel, Query, Row
from dashboards.prometheus.gateway_alerts import FAILED, JUDGED
from dashboards.prometheus.promql import increase, or_zero, quantile, rate, selected, summed
from dashboards.prometheus.recording import FIGURES, QUANTILES

RATE, RANGE = "$__rate_interval", "$__range"
_SLO = "tokenline_slo_requests_total"
_NAMES = {
    "ttft": ("TTFT", "First token written to the client minus ingress; streams only."),
    "tpot": ("TPOT", "(last token - first token) / (output tokens - 1)."),
    "e2e": ("E2E", "Last byte handed to the transport minus ingress."),
}


def overview() -> Board:
    """The page to begin with."""
    return Board(
        "tokenline-overview",
        "Objectives, traffic, latency and errors of the gateway.",
        (
            Row("Objectives", (*_attainment(), _alerts())),
            Row("Latency", tuple(_percentiles(figure) for figure in FIGURES)),
            Row("Every request", (_heat_map("ttft"), _heat_map("tpot"), _heat_map("e2e"))),
            Row("Traffic", _traffic()),
            Row("Models and upstreams", (*_worst(), *_upstreams())),
        ),
    )


def _good(window: str, *by: str) -> str:
    """Share of good requests, 1 where none was bad."""
    every = summed(rate(_SLO, window, MODEL), "slo", *by)
    bad = summed(rate(_SLO, window, MODEL, 'result="bad"'), "slo", *by)
    return f"1 - {or_zero(bad, every)} / ({every} > 0)"


def _attainment() -> tuple[Panel, ...]:
    told = "Share of requests that met the objective of [slo]. Waiting requests are bad once their time has passed."
    return (
        Panel(
            "SLO attainment", told, "percentunit", (Query(_good(RANGE), "{{slo}}", instant=True),), "stat", 6, maximum=1
        ),
        Panel(
            "SLO attainment by model",
            told,
            "percentunit",
            (Query(_good(RATE, "model"), "{{model}} {{slo}}"),),
            width=10,
        ),
    )


def _alerts() -> Panel:
    return Panel("Alerts", "Alerts of Tokenline that fire or are about to.", "none", (), "alertlist", 8)


def _percentiles(figure: str) -> Panel:
    title, told = _NAMES[figure]
    queries = tuple(Query(quantile(q, FIGURES[figure], RATE, *ROUTE), name.upper()) for name, q in QUANTILES)
    return Panel(f"{title} P50, P95, P99", f"{told} Of the requests within the rate interval.", "s", queries)


def _heat_map(figure: str) -> Panel:
    title, told = _NAMES[figure]
    expr = summed(rate(f"{FIGURES[figure]}_bucket", RATE, *ROUTE), "le")
    query = Query(expr, "{{le}}", exemplars=True)
    told = f"{told} A dot is a request whose trace is kept: it links to its page."
    return Panel(f"{title} of requests", told, "s", (query,), "heatmap")


def _traffic() -> tuple[Panel, ...]:
    requests = summed(rate("tokenline_requests_total", RATE, *ROUTE), "outcome")
    every = summed(rate("tokenline_requests_total", RATE, *ROUTE, JUDGED))
    failed = summed(rate("tokenline_requests_total", RATE, *ROUTE, FAILED))
    tokens = summed(rate("tokenline_tokens_total", RATE, MODEL), "direction")
    none_failed = "nothing failed"
    return (
        Panel(
            "Requests per second",
            "Requests that ended, by outcome.",
            "reqps",
            (Query(requests, "{{outcome}}"),),
            width=6,
            stacked=True,
        ),
        Panel(
            "Tokens per second",
            "As upstreams counted them: output, reasoning within it, input, cached within it.",
            "short",
            (Query(tokens, "{{direction}}"),),
            width=6,
        ),
        Panel(
            "Errors",
            "Share of requests that failed by the fault of an upstream or the gateway.",
            "percentunit",
            (Query(f"{or_zero(failed, every)} / {every}", "failed", silent_when_well=none_failed),),
            width=6,
        ),
        Panel(
            "In flight",
            "Requests at upstreams, and those that wait in the gateway for room.",
            "short",
            (
                Query(summed(selected("tokenline_inflight_requests", UPSTREAM), "upstream"), "{{upstream}}"),
                Query("sum(tokenline_queue_depth)", "waiting for room"),
                Query("sum(tokenline_inflight_places)", "room for"),
            ),
            width=6,
        ),
    )


def _worst() -> tuple[Panel, ...]:
    ttft = quantile(0.95, FIGURES["ttft"], RANGE, *ROUTE, by=("model",))
    return (
        Panel(
            "Worst models by TTFT P95",
            "The ten slowest over the whole range.",
            "s",
            (Query(f"topk(10, {ttft})", "{{model}}", instant=True),),
            "table",
        ),
        Panel(
            "Worst models by SLO attainment",
            "The ten with the smallest share of good requests over the whole range.",
            "percentunit",
            (Query(f"bottomk(10, {_good(RANGE, 'model')})", "{{model}} {{slo}}", instant=True),),
            "table",
        ),
    )


def _upstreams() -> tuple[Panel, ...]:
    attempts = summed(rate("tokenline_attempts_total", RATE, UPSTREAM), "upstream", "result")
    return (
        Panel(
            "Attempts",
            "Attempts at upstreams by result; a request may need several.",
            "reqps",
            (Query(attempts, "{{upstream}} {{result}}"),),
            width=6,
        ),
        Panel(
            "Upstreams up",
            "1 when the last health check passed.",
            "short",
            (Query(f"min by (upstream) ({selected('tokenline_upstream_up', UPSTREAM)})", "{{upstream}}"),),
            maximum=1,
            width=6,
        ),
        Panel(
            "Breakers",
            "0 closed, 1 half open, 2 open: the worst of all workers.",
            "short",
            (Query(f"max by (upstream) ({selected('tokenline_breaker_state', UPSTREAM)})", "{{upstream}}"),),
            maximum=2,
            width=6,
        ),
        Panel(
            "Configuration",
            "Reloads within the rate interval, by result, and hours since the one in force was read.",
            "short",
            (
                Query(summed(increase("tokenline_config_reloads_total", RATE), "result"), "{{result}}"),
                Query("(time() - max(tokenline_config_last_success_timestamp_seconds)) / 3600", "hours in force"),
            ),
            width=6,
        ),
    )
