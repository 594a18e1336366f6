"""Tenants: who uses how much, and whose limits are hit. Teams alone are labels; keys are in the console and the CLI."""

from __future__ import annotations

from dashboards.grafana.board import MODEL, Board
from dashboards.grafana.panel import Panel, Query, Row
from dashboards.prometheus.promql import increase, quantile, rate, summed
from dashboards.sources import Places

RATE, RANGE = "$__rate_interval", "$__range"
TOKENS = "tokenline_tokens_total"


def tenants(places: Places) -> Board:
    """Of teams; a key is no label, so that series stay bounded."""
    return Board(
        "tokenline-tenants",
        "Tokens by team, limits hit, sizes of requests. Single keys: `tokenline keys usage`, and the console.",
        (Row("Tokens", _tokens(places)), Row("Limits", _limits()), Row("Sizes", _sizes())),
    )


def _tokens(places: Places) -> tuple[Panel, ...]:
    def of(direction: str) -> str:
        return f'direction="{direction}"'

    keys = (("Requests by key", places.console),)
    return (
        Panel(
            "Output tokens per second by team",
            "As upstreams counted them.",
            "short",
            (Query(summed(rate(TOKENS, RATE, MODEL, of("output")), "team"), "{{team}}"),),
            stacked=True,
            links=keys,
        ),
        Panel(
            "Input tokens per second by team",
            "As upstreams counted them.",
            "short",
            (Query(summed(rate(TOKENS, RATE, MODEL, of("input")), "team"), "{{team}}"),),
            stacked=True,
            links=keys,
        ),
        Panel(
            "Tokens in range",
            "By team, model and direction, over the whole range.",
            "short",
            (Query(summed(increase(TOKENS, RANGE, MODEL), "team", "model", "direction"), "", instant=True),),
            "table",
            links=keys,
        ),
    )


def _limits() -> tuple[Panel, ...]:
    refused = summed(
        rate("tokenline_requests_total", RATE, 'outcome=~"rate_limited|queue_rejected|auth_error"'), "outcome"
    )
    return (
        Panel(
            "Limits hit",
            "Requests that the gateway refused, by reason.",
            "reqps",
            (
                Query(
                    summed(rate("tokenline_rejections_total", RATE), "reason"),
                    "{{reason}}",
                    silent_when_well="nobody reached a limit",
                ),
            ),
        ),
        Panel(
            "Refused requests",
            "Beyond a limit, without room, or without a valid key.",
            "reqps",
            (Query(refused, "{{outcome}}", silent_when_well="nobody was refused"),),
        ),
        Panel(
            "Limits degraded",
            "1 while Redis can't be asked and each gateway limits by itself.",
            "short",
            (Query("max by (instance) (tokenline_limits_degraded)", "{{instance}}"),),
            maximum=1,
        ),
    )


def _sizes() -> tuple[Panel, ...]:
    def sizes(metric: str) -> tuple[Query, ...]:
        return tuple(Query(quantile(q, metric, RATE, MODEL), f"P{q * 100:g}") for q in (0.5, 0.95, 0.99))

    return (
        Panel("Prompt tokens", "Of a request.", "short", sizes("tokenline_prompt_tokens"), width=12),
        Panel("Output tokens", "Of a request.", "short", sizes("tokenline_output_tokens"), width=12),
    )
