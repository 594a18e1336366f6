"""Each alert in a table: it fires, it does not, it stays quiet at low traffic, it resolves."""

from __future__ import annotations

from promtool_rig import Case, Series, histogram, level, ramp

MODEL = 'model="m"'
ROUTE = 'job="tokenline",instance="g:9464",model="m",upstream="u",surface="chat"'
_SLOW_S, _FAST_S = {"ttft": 3.0, "tpot": 0.3}, {"ttft": 0.4, "tpot": 0.04}
_BOUNDS = {"ttft": (0.5, 1.0, 2.0, 4.0), "tpot": (0.05, 0.1, 0.2, 0.4)}
_METRIC = {"ttft": "gen_ai_server_time_to_first_token_seconds", "tpot": "gen_ai_server_time_per_output_token_seconds"}


def slo(*phases: tuple[int, float, float]) -> Series:
    """Phases of (samples, good, bad) per sample."""
    name = "tokenline_slo_requests_total"
    return {
        f'{name}{{{MODEL},slo="ttft",result="good"}}': ramp(*((samples, good) for samples, good, _ in phases)),
        f'{name}{{{MODEL},slo="ttft",result="bad"}}': ramp(*((samples, bad) for samples, _, bad in phases)),
    }


def burn_cases() -> list[Case]:
    """Every burn rate: (alert, interval, samples until it surely fires, share of bad that fires, that does not)."""
    cases = []
    for alert, interval, minutes, over, under in (
        ("TokenlineSloBurnFast", "1m", 1, 0.2, 0.1),
        ("TokenlineSloBurnMedium", "5m", 5, 0.08, 0.04),
        ("TokenlineSloBurnSlow", "20m", 20, 0.04, 0.02),
        ("TokenlineSloBurnCreeping", "1h", 60, 0.015, 0.005),
    ):

        def at(sample: int, minutes: int = minutes) -> str:
            return f"{sample * minutes}m"

        def mixed(share: float, count: float = 100) -> tuple[int, float, float]:
            return 30, count * (1 - share), count * share

        cases += [
            Case(alert, "fires and resolves", slo(mixed(over), (20, 100, 0)), (at(25),), (at(45),), interval),
            Case(alert, "does not fire within the budget", slo(mixed(under)), (), (at(25),), interval),
            Case(alert, "low traffic wakes nobody", slo((30, 0.15, 0.12)), (), (at(25),), interval),
        ]
    hung = {f'tokenline_slo_requests_total{{{MODEL},slo="ttft",result="bad"}}': ramp((60, 2))}
    cases.append(Case("TokenlineSloBurnFast", "fires where nothing is good and nothing ends", hung, ("30m",)))
    return cases


def percentile_cases() -> list[Case]:
    cases = []
    for figure, name in _METRIC.items():
        labels = ROUTE if figure == "ttft" else f'{ROUTE},count="usage"'

        def of(
            *phases: tuple[int, float, float], name: str = name, labels: str = labels, figure: str = figure
        ) -> Series:
            return histogram(name, labels, _BOUNDS[figure], *phases)

        slow, fast = _SLOW_S[figure], _FAST_S[figure]
        for quantile in ("P95", "P99"):
            alert = f"Tokenline{figure.capitalize()}{quantile}High"
            cases += [
                Case(alert, "fires and resolves", of((30, 30, slow), (30, 30, fast)), ("20m",), ("3m", "50m")),
                Case(alert, "does not fire on fast answers", of((30, 30, fast)), (), ("20m",)),
                Case(alert, "low traffic wakes nobody", of((30, 2, slow)), (), ("20m",)),
            ]
    return cases


def engine_cases() -> list[Case]:
    e, bounds = "tokenline_engine_", (0.5, 1.0, 2.0, 5.0)
    queue = f"{e}request_queue_time_seconds"

    def cache(*phases: tuple[int, float, float]) -> Series:
        """Phases of (samples, tokens looked up, share found)."""
        return {
            f"{e}prefix_cache_queries_total{{{MODEL}}}": ramp(*((n, tokens) for n, tokens, _ in phases)),
            f"{e}prefix_cache_hits_total{{{MODEL}}}": ramp(*((n, tokens * share) for n, tokens, share in phases)),
        }

    def steps(*phases: tuple[int, float, float]) -> Series:
        """Phases of (samples, seconds of gaps, seconds of forwards) per minute."""
        return {
            f"{e}token_gap_seconds_sum{{{MODEL}}}": ramp(*((n, gap) for n, gap, _ in phases)),
            f"{e}forward_seconds_total{{{MODEL}}}": ramp(*((n, forward) for n, _, forward in phases)),
        }

    up = {'up{job="tokenline",instance="g:9464"}': "1x60"}
    running = f"{e}num_requests_running{{{MODEL}}}"
    kv = f"{e}kv_cache_usage_ratio{{{MODEL}}}"
    return [
        Case(
            "TokenlineEngineQueueWait",
            "fires and resolves",
            histogram(queue, MODEL, bounds, (30, 30, 1.5), (30, 30, 0.2)),
            ("20m",),
            ("3m", "50m"),
        ),
        Case(
            "TokenlineEngineQueueWait",
            "not on short waits",
            histogram(queue, MODEL, bounds, (30, 30, 0.2)),
            (),
            ("20m",),
        ),
        Case(
            "TokenlineEngineQueueWait",
            "not at low traffic",
            histogram(queue, MODEL, bounds, (30, 2, 1.5)),
            (),
            ("20m",),
        ),
        Case(
            "TokenlineKvHeadroomLow", "fires and resolves", {kv: level((20, 0.9), (20, 0.5))}, ("15m",), ("3m", "30m")
        ),
        Case("TokenlineKvHeadroomLow", "not with room", {kv: level((20, 0.7))}, (), ("15m",)),
        Case("TokenlineKvHeadroomLow", "not idle", {kv: level((20, 0))}, (), ("15m",)),
        Case(
            "TokenlineCacheHitCollapse",
            "fires, and resolves when hits come back",
            cache((60, 25_000, 0.8), (12, 25_000, 0.1), (24, 25_000, 0.8)),
            ("340m",),
            ("295m", "420m"),
            "5m",
        ),
        Case("TokenlineCacheHitCollapse", "not on a steady share", cache((72, 25_000, 0.8)), (), ("340m",), "5m"),
        Case(
            "TokenlineCacheHitCollapse",
            "not where hits are always rare",
            cache((60, 25_000, 0.1), (12, 25_000, 0)),
            (),
            ("340m",),
            "5m",
        ),
        Case(
            "TokenlineCacheHitCollapse",
            "not at low traffic",
            cache((60, 250, 0.8), (12, 250, 0.1)),
            (),
            ("340m",),
            "5m",
        ),
        Case("TokenlineTokenGapHigh", "fires and resolves", steps((30, 15, 40), (30, 1, 50)), ("25m",), ("5m", "50m")),
        Case("TokenlineTokenGapHigh", "not when the device is kept busy", steps((30, 2, 50)), (), ("25m",)),
        Case("TokenlineTokenGapHigh", "not at low traffic", steps((30, 2, 2)), (), ("25m",)),
        Case(
            "TokenlineEngineSilent",
            "fires and resolves",
            {running: "0x10 _x15 0x20"} | up,
            ("20m",),
            ("5m", "35m"),
        ),
        Case("TokenlineEngineSilent", "not while the engine idles", {running: "0x30"} | up, (), ("20m",)),
        Case(
            "TokenlineEngineSilent",
            "not when the gateway is away too",
            {'up{job="tokenline",instance="g:9464"}': "0x60"},
            (),
            ("20m",),
        ),
    ]


def gateway_cases() -> list[Case]:
    def requests(*phases: tuple[int, float, float], outcome: str = "upstream_error") -> Series:
        """Phases of (samples, ok, others) per sample."""
        name = f"tokenline_requests_total{{{ROUTE}"
        return {
            f'{name},outcome="ok",status="200"}}': ramp(*((n, ok) for n, ok, _ in phases)),
            f'{name},outcome="{outcome}",status="502"}}': ramp(*((n, bad) for n, _, bad in phases)),
        }

    def closing(*phases: tuple[int, float, float]) -> Series:
        """Phases of (samples, requests, unaccounted seconds each), TTFT being 1 s."""
        at = 'instance="g:9464",upstream="u"'
        return {
            f"gen_ai_server_time_to_first_token_seconds_sum{{{ROUTE}}}": ramp(*((n, count) for n, count, _ in phases)),
            f"tokenline_ttft_unaccounted_seconds_sum{{{at}}}": ramp(*((n, count * lost) for n, count, lost in phases)),
            f"tokenline_ttft_unaccounted_seconds_count{{{at}}}": ramp(*((n, count) for n, count, _ in phases)),
        }

    lag, lag_bounds = "tokenline_event_loop_lag_seconds", (0.001, 0.01, 0.05, 0.1, 0.2)
    worker = 'instance="g:9464",worker="0"'
    waiting = f"tokenline_oldest_waiting_seconds{{{MODEL}}}"
    one, two = 'tokenline_upstream_up{upstream="a"}', 'tokenline_upstream_up{upstream="b"}'
    degraded = 'tokenline_limits_degraded{instance="g:9464"}'
    up = 'up{job="tokenline",instance="g:9464"}'
    failed, taken = (f'tokenline_config_reloads_total{{instance="g:9464",result="{r}"}}' for r in ("failed", "ok"))
    ledgers = 'tokenline_ledgers_dropped_total{instance="g:9464"}'
    traces = 'tokenline_traces_dropped_total{instance="g:9464",reason="disk"}'
    return [
        Case("TokenlineRequestWaiting", "fires and resolves", {waiting: "0+60x10 0x10"}, ("5m",), ("15m",)),
        Case("TokenlineRequestWaiting", "not on a short wait", {waiting: level((20, 8))}, (), ("15m",)),
        Case("TokenlineRequestWaiting", "not idle", {waiting: level((20, 0))}, (), ("15m",)),
        Case(
            "TokenlineErrorRatioHigh", "fires and resolves", requests((20, 40, 4), (20, 40, 0)), ("15m",), ("2m", "30m")
        ),
        Case("TokenlineErrorRatioHigh", "not on few errors", requests((20, 40, 1)), (), ("15m",)),
        Case(
            "TokenlineErrorRatioHigh",
            "not on clients' errors",
            requests((20, 40, 40), outcome="client_error"),
            (),
            ("15m",),
        ),
        Case("TokenlineErrorRatioHigh", "not at low traffic", requests((20, 1, 1)), (), ("15m",)),
        Case(
            "TokenlineUpstreamDown",
            "fires and resolves",
            {one: level((9, 1), (10, 0), (9, 1)), two: level((30, 1))},
            ("15m",),
            ("5m", "25m"),
        ),
        Case("TokenlineUpstreamDown", "not when all are up", {one: level((30, 1)), two: level((30, 1))}, (), ("15m",)),
        Case(
            "TokenlineNoUpstream",
            "fires and resolves",
            {one: level((15, 0), (9, 1)), two: level((30, 0))},
            ("10m",),
            ("20m",),
        ),
        Case("TokenlineNoUpstream", "not while one is up", {one: level((30, 0)), two: level((30, 1))}, (), ("15m",)),
        Case(
            "TokenlineLimitsDegraded",
            "fires and resolves",
            {degraded: level((15, 1), (15, 0))},
            ("10m",),
            ("1m", "20m"),
        ),
        Case("TokenlineLimitsDegraded", "not while Redis answers", {degraded: level((30, 0))}, (), ("10m",)),
        Case(
            "TokenlineUnaccountedTime",
            "fires and resolves",
            closing((30, 30, 0.1), (30, 30, 0.001)),
            ("20m",),
            ("3m", "50m"),
        ),
        Case("TokenlineUnaccountedTime", "not when the timeline closes", closing((30, 30, 0.01)), (), ("20m",)),
        Case("TokenlineUnaccountedTime", "not at low traffic", closing((30, 2, 0.1)), (), ("20m",)),
        Case(
            "TokenlineEventLoopLag",
            "fires and resolves",
            histogram(lag, worker, lag_bounds, (30, 60, 0.15), (30, 60, 0.001)),
            ("20m",),
            ("3m", "50m"),
        ),
        Case(
            "TokenlineEventLoopLag",
            "not on a prompt loop",
            histogram(lag, worker, lag_bounds, (30, 60, 0.001)),
            (),
            ("20m",),
        ),
        Case(
            "TokenlineRecordsLost",
            "fires and resolves",
            {ledgers: ramp((20, 3), (20, 0)), traces: level((60, 0))},
            ("15m",),
            ("3m", "35m"),
        ),
        Case(
            "TokenlineRecordsLost",
            "fires on traces",
            {ledgers: level((60, 0)), traces: ramp((20, 3), (20, 0))},
            ("15m",),
            ("35m",),
        ),
        Case(
            "TokenlineConfigNotReloaded",
            "fires and resolves by itself",
            {failed: "0x4 1x60", taken: "0x64"},
            ("10m",),
            ("3m", "30m"),
        ),
        Case(
            "TokenlineConfigNotReloaded",
            "resolves when a reload works",
            {failed: "0x4 1x60", taken: "0x9 1x55"},
            ("8m",),
            ("12m",),
        ),
        Case("TokenlineConfigNotReloaded", "not by reloads that work", {failed: "0x64", taken: "0+1x64"}, (), ("20m",)),
        Case("TokenlineRecordsLost", "not while nothing is lost", {ledgers: level((60, 0))}, (), ("15m",)),
        Case("TokenlineNoData", "fires and resolves", {up: level((5, 1), (10, 0), (10, 1))}, ("10m",), ("3m", "20m")),
        Case("TokenlineNoData", "fires where nothing was ever scraped", {'up{job="other"}': "1x20"}, ("10m",)),
        Case("TokenlineNoData", "not while scrapes succeed", {up: level((20, 1))}, (), ("10m",)),
    ]


def all_cases() -> list[Case]:
    return [*burn_cases(), *percentile_cases(), *engine_cases(), *gateway_cases()]
