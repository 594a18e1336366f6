"""Where the time goes: the stages of the fast half and of the slowest side by side. Tail attribution, not means."""

from __future__ import annotations

from dashboards.grafana.board import MODEL, ROUTE, UPSTREAM, Board
from dashboards.grafana.panel import Panel, Query, Row
from dashboards.prometheus.promql import mean, quantile, rate, summed
from dashboards.prometheus.recording import FIGURES, MEDIAN_BAND, SLOW_BANDS

RATE, RANGE = "$__rate_interval", "$__range"
BANDS = (("the median half", MEDIAN_BAND), ("the slowest 5 %", SLOW_BANDS), ("the slowest 1 %", 'band="p99+"'))
_STAGE = "tokenline_stage_duration_seconds"


def where_the_time_goes() -> Board:
    """The page for the question why."""
    return Board(
        "tokenline-time",
        "Stages of requests by the band of their TTFT, and what lies outside all stages.",
        (
            Row("Stages of a stream's TTFT, over the whole range", tuple(_bars(*band) for band in BANDS)),
            Row("The same over time", tuple(_stack(*band) for band in BANDS)),
            Row("Stage by stage", _stages()),
            Row("The gateway itself", _gateway()),
            Row("Clients", _clients()),
        ),
    )


def _seconds(window: str, band: str) -> str:
    """Seconds that a request of the band spent in each stage."""
    seconds = summed(rate("tokenline_band_stage_seconds_total", window, MODEL, band), "stage")
    requests = summed(rate("tokenline_band_requests_total", window, MODEL, band))
    return f"{seconds} / on () group_left () ({requests} > 0)"


_TOLD = "Seconds per request of this band; bands are by TTFT against the model's last hour. The stages sum to TTFT."


def _bars(title: str, band: str) -> Panel:
    query = Query(f"sort_desc({_seconds(RANGE, band)})", "{{stage}}", instant=True)
    return Panel(title.capitalize(), _TOLD, "s", (query,), "bargauge", height=10)


def _stack(title: str, band: str) -> Panel:
    return Panel(
        f"{title.capitalize()}, over time", _TOLD, "s", (Query(_seconds(RATE, band), "{{stage}}"),), stacked=True
    )


def _stages() -> tuple[Panel, ...]:
    def p95(title: str, told: str, *names: str) -> Panel:
        chosen = f'stage=~"{"|".join(names)}"'
        expr = quantile(0.95, _STAGE, RATE, UPSTREAM, chosen, by=("stage",))
        return Panel(title, f"{told} P95; percentiles of stages do not add up.", "s", (Query(expr, "{{stage}}"),))

    sizes = quantile(0.95, "tokenline_ttft_by_prompt_size_seconds", RATE, MODEL, by=("size",))
    return (
        p95("Waiting", "For room in the gateway and for a slot of the engine.", "gateway_queue", "engine_queue"),
        p95("Prefill and decode", "Of our engine.", "engine_tokenize", "engine_prefill", "engine_decode"),
        p95(
            "On the way",
            "Between gateway and upstream, and its whole wait where it reports nothing.",
            "connect",
            "send",
            "transit",
            "transit_out",
            "transit_back",
            "upstream_wait",
        ),
        p95("In the gateway", "From ingress to the upstream and back.", "auth", "receive", "route", "relay"),
        p95("After the first token", "Streaming to its last token, and closing.", "streaming", "closing"),
        Panel("TTFT P95 by prompt size", "By prompt tokens of the request.", "s", (Query(sizes, "{{size}}"),)),
    )


def _gateway() -> tuple[Panel, ...]:
    unaccounted = "tokenline_ttft_unaccounted_seconds"
    share = (
        f"{summed(rate(f'{unaccounted}_sum', RATE, UPSTREAM))} / {summed(rate(FIGURES['ttft'] + '_sum', RATE, *ROUTE))}"
    )
    overhead = "tokenline_gateway_overhead_seconds"
    lag = quantile(0.99, "tokenline_event_loop_lag_seconds", RATE, by=("worker",))
    return (
        Panel(
            "Unaccounted share of TTFT", "TTFT that lies in no stage.", "percentunit", (Query(share, "unaccounted"),)
        ),
        Panel(
            "Gateway overhead",
            "E2E minus upstream attempts, the client's upload, the gateway's queue and back-pressure.",
            "s",
            tuple(Query(quantile(q, overhead, RATE, UPSTREAM), f"P{q * 100:g}") for q in (0.5, 0.95, 0.99)),
        ),
        Panel("Event-loop lag P99", "How late a worker's event loop ran.", "s", (Query(lag, "worker {{worker}}"),)),
        Panel(
            "Records lost, anomalies",
            "Ledgers and traces that were dropped; intervals that came out negative.",
            "short",
            (
                Query(summed(rate("tokenline_ledgers_dropped_total", RATE)), "ledgers"),
                Query(
                    summed(rate("tokenline_traces_dropped_total", RATE), "reason"),
                    "traces: {{reason}}",
                    silent_when_well="no trace was dropped",
                ),
                Query(
                    summed(rate("tokenline_timing_anomalies_total", RATE), "kind"),
                    "anomalies: {{kind}}",
                    silent_when_well="no interval came out negative",
                ),
            ),
            width=12,
        ),
        Panel(
            "Traces and spans",
            "Traces kept, and spans that the OTLP receiver took or refused, per second.",
            "short",
            (
                Query(summed(rate("tokenline_traces_kept_total", RATE)), "traces kept"),
                Query(summed(rate("tokenline_spans_received_total", RATE), "result"), "spans: {{result}}"),
            ),
            width=12,
        ),
    )


def _clients() -> tuple[Panel, ...]:
    skipped = Query(
        summed(rate("tokenline_tpot_skipped_total", RATE), "reason"),
        "no TPOT: {{reason}}",
        silent_when_well="nobody asked for several choices in one stream",
    )
    wasted = Query(
        summed(rate("tokenline_wasted_tokens_total", RATE, UPSTREAM)),
        "wasted tokens",
        silent_when_well="the engine made no token after its client had left",
    )
    return (
        Panel(
            "Network round trip",
            "Of clients' connections, as the kernel measures it: mean and P95.",
            "s",
            (
                Query(mean("tokenline_client_rtt_seconds", RATE), "mean"),
                Query(quantile(0.95, "tokenline_client_rtt_seconds", RATE), "P95"),
            ),
        ),
        Panel(
            "Back-pressure P95",
            "Time in which a stream's written bytes had not been taken by its client.",
            "s",
            (Query(quantile(0.95, "tokenline_client_backpressure_seconds", RATE), "P95"),),
        ),
        Panel(
            "Clients that left",
            "P95 of the time until the upstream was let go; tokens made after it; streams without TPOT.",
            "short",
            (
                Query(quantile(0.95, "tokenline_abort_propagation_seconds", RATE, UPSTREAM), "seconds to let go, P95"),
                wasted,
                skipped,
            ),
        ),
        Panel(
            "Oldest waiting request",
            "Age of the oldest stream without a first token.",
            "s",
            (Query(f"max by (model) (tokenline_oldest_waiting_seconds{{{MODEL}}})", "{{model}}"),),
        ),
    )
