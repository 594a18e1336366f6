"""Every sample on the metrics page: exactly once, in its series, with its value; and nothing else."""

from __future__ import annotations

from collections.abc import Iterator

from conformance_rig import MODEL
from expectation import Expect, Played

from tracing.ledger import Outcome


def check_samples(played: Played, expect: Expect, before: dict[str, float]) -> None:
    """Every sample on the metrics page, exactly once and in its series; nothing else was counted."""
    after = played.bench.samples()
    seen = {name: value - before.get(name, 0) for name, value in after.items()}
    seen = {name: value for name, value in seen.items() if value and not name.startswith(NOT_OF_ONE_REQUEST)}
    wanted = _samples(played, expect)
    assert set(seen) == set(wanted)
    for name, value in wanted.items():
        assert abs(seen[name] - value) < 1e-6, (name, seen[name], value)


NOT_OF_ONE_REQUEST = ("tokenline_event_loop_lag_seconds", "tokenline_band_")
"""The worker's own, and what depends on the requests before."""


def _samples(played: Played, expect: Expect) -> dict[str, float]:
    ledger, timeline = played.ledger, played.row.timeline
    found: dict[str, float] = {}

    def observe(name: str, value: float, **labels: str) -> None:
        written = ",".join(f"{k}={v}" for k, v in sorted(labels.items()))
        found[f"{name}_count{{{written}}}"] = 1
        if value:
            found[f"{name}_sum{{{written}}}"] = value

    def count(name: str, value: float = 1, **labels: str) -> None:
        written = ",".join(f"{k}={v}" for k, v in sorted(labels.items()))
        key = f"{name}{{{written}}}"
        found[key] = found.get(key, 0) + value

    upstream = expect.attempts[-1][0] if expect.attempts else "none"
    route = {"model": MODEL, "upstream": upstream, "surface": played.surface}
    if timeline.ttft is not None:
        observe("gen_ai_server_time_to_first_token_seconds", timeline.ttft, **route)
    if timeline.tpot is not None:
        observe("gen_ai_server_time_per_output_token_seconds", timeline.tpot, **route, count=expect.counted_by or "")
    assert timeline.e2e is not None
    observe("gen_ai_server_request_duration_seconds", timeline.e2e, **route)
    status = str(ledger.status) if ledger.status else "none"
    count("tokenline_requests_total", **route, outcome=expect.outcome.value, status=status)
    for name, value in (*timeline.stages.items(), *timeline.after.items()):
        observe("tokenline_stage_duration_seconds", value, stage=name, upstream=upstream)
    for name, result in expect.attempts:
        count("tokenline_attempts_total", upstream=name, result=result)
    if expect.attempts:
        busy = sum(a.end - a.connect_start for a in ledger.attempts)
        queue = (ledger.admitted - ledger.routed) + (ledger.body_read - ledger.authenticated)
        after_attempts = min(ledger.backpressure_ns, ledger.finish - played.last.end)
        overhead = (ledger.finish - ledger.ingress - busy - queue - after_attempts) / 1e9
        observe("tokenline_gateway_overhead_seconds", overhead, upstream=upstream)
    if timeline.ttft is not None and expect.told_by == "here":
        observe("tokenline_ttft_unaccounted_seconds", abs(timeline.unaccounted or 0), upstream=upstream)
    if expect.counted_by == "usage" and expect.tokens is not None:
        script = played.script
        observe("tokenline_prompt_tokens", script.input_tokens, model=MODEL)
        observe("tokenline_output_tokens", expect.tokens, model=MODEL)
        count("tokenline_tokens_total", script.input_tokens, direction="input", model=MODEL, team="none")
        count("tokenline_tokens_total", expect.tokens, direction="output", model=MODEL, team="none")
        if script.reasoning_tokens:
            count("tokenline_tokens_total", script.reasoning_tokens, direction="reasoning", model=MODEL, team="none")
        if timeline.ttft is not None:
            observe("tokenline_ttft_by_prompt_size_seconds", timeline.ttft, model=MODEL, size="le_256")
    if ledger.client_rtt_ns:
        observe("tokenline_client_rtt_seconds", ledger.client_rtt_ns / 1e9)
    if timeline.ttft is not None:
        observe("tokenline_client_backpressure_seconds", ledger.backpressure_ns / 1e9)
    if expect.outcome is Outcome.CLIENT_CANCELLED and expect.attempts:
        gone = (played.last.end - ledger.client_gone) / 1e9
        observe("tokenline_abort_propagation_seconds", gone, upstream=upstream)
    for objective, result in _objectives(played, expect):
        count("tokenline_slo_requests_total", model=MODEL, slo=objective, result=result)
    if expect.rejected:
        count("tokenline_rejections_total", reason=expect.rejected)
    count("tokenline_traces_kept_total")
    return found


def _objectives(played: Played, expect: Expect) -> Iterator[tuple[str, str]]:
    """(objective, result): every request once for each objective that it can be judged by. None here is slow."""
    timeline = played.row.timeline
    failed = expect.outcome in (Outcome.UPSTREAM_ERROR, Outcome.QUEUE_REJECTED)
    if timeline.ttft is not None:
        yield "ttft", "good"
    elif failed:
        yield "ttft", "bad"
    elif expect.outcome is Outcome.OK and expect.told_by in ("here", "elsewhere", "span"):
        yield "ttft", "good"  # of an answer in one piece the engine knows when its first token was there
    if failed and played.ledger.first_token:
        yield "tpot", "bad"
    elif timeline.tpot is not None:
        yield "tpot", "good"
