"""Rules: from the stage that made a request slow, and what was measured around it, to one row of the table."""

from __future__ import annotations

from collections.abc import Callable

from tracing.observer.baseline import step_gap, tpot_of
from tracing.observer.causes import Cause, Finding, Numbers, remedy
from tracing.observer.evidence import Evidence

HALF = 0.5
"""What explains at least this share of the excess is its cause."""
KV_HEADROOM = 0.2
"""With less of the KV cache free, enlarging it comes before everything else."""
MORE = 1.3
"""Times the usual number of sequences, from which a batch is large."""
MORE_TOKENS = 1.2
"""Times the usual number of prompt tokens, from which a prompt is long."""
MIN_MORE_TOKENS = 16
"""More prompt tokens than usual that matter at all."""
MORE_OUTPUT = 1.5
"""Times the usual number of output tokens, from which an answer is long."""
LONG_PROMPT_TOKENS = 1024
"""Computed prompt tokens that are many where nothing is known to compare with."""
FAR_CLIENT = 0.05
"""Seconds of round trip below which a client is near."""
LINK_SHARE = 0.25
"""Share of a residual transit's excess that connecting and sending must have too, to show that the link was slow."""
SILENT_CLIENT = 0.1
"""Seconds not taken by a client that make it slow though the request was not."""


def cause_of(evidence: Evidence) -> Finding:
    """The one cause of a request that ended by itself or by its client's will."""
    if not evidence.stages:
        return Finding(remedy(Cause.UNKNOWN, "gather_evidence"), None, certain=False)
    if evidence.figures and not evidence.slow:
        return _slow_client(evidence) or Finding(remedy(Cause.NONE, "nothing"), None)
    suspects = evidence.suspects
    stage = max(suspects, key=suspects.__getitem__)
    return _busy_gateway(evidence, stage, sum(suspects.values())) or _BY_STAGE.get(stage, _unknown)(evidence, stage)


def _busy_gateway(evidence: Evidence, stage: str, excess: float) -> Finding | None:
    """Lag hides in every stage that waits for the relay's turn: it is asked about before they are."""
    if stage in ("streaming", "closing") or evidence.lag < HALF * excess or not evidence.lag:
        return None
    numbers: Numbers = {"lag": evidence.lag, "lag_share": min(1.0, evidence.lag / excess)}
    return Finding(remedy(Cause.GATEWAY_BUSY, "relieve_gateway"), stage, numbers=numbers)


def _slow_client(evidence: Evidence) -> Finding | None:
    """A slow reader need not make the request slow: the gateway's buffer takes the answer."""
    stages, ledger = evidence.stages, evidence.ledger
    streamed = stages.get("streaming", 0.0) + stages.get("closing", 0.0)
    if evidence.backpressure >= max(SILENT_CLIENT, HALF * streamed):
        return _client(evidence, "streaming" if "streaming" in stages else "closing")
    far_behind = ledger.stream and ledger.unsent_bytes >= max(2**14, HALF * ledger.response_bytes)
    return _client(evidence, "streaming", certain=False) if far_behind else None


def _client(evidence: Evidence, stage: str, *, certain: bool = True) -> Finding:
    numbers: Numbers = {
        "backpressure": evidence.backpressure,
        "unsent": evidence.ledger.unsent_bytes or None,
        "rtt": evidence.ledger.client_rtt_ns / 1e9 or None,
    }
    return Finding(remedy(Cause.SLOW_CLIENT, "check_client_reading"), stage, certain, numbers=numbers)


def _receive(evidence: Evidence, stage: str) -> Finding:
    rtt, usual = evidence.ledger.client_rtt_ns / 1e9, evidence.usual("client_rtt")
    numbers: Numbers = {"rtt": rtt or None, "rtt_usual": usual}
    if usual is not None and rtt >= max(FAR_CLIENT, 2 * usual):
        return Finding(remedy(Cause.NETWORK, "check_client_link"), stage, numbers=numbers)
    return Finding(remedy(Cause.SLOW_CLIENT, "check_client_upload"), stage, numbers=numbers)


def _gateway_queue(evidence: Evidence, stage: str) -> Finding:
    return Finding(remedy(Cause.GATEWAY_QUEUE, "raise_max_concurrent"), stage)


def _failed_attempts(evidence: Evidence, stage: str) -> Finding:
    failed = evidence.ledger.attempts[0]
    numbers: Numbers = {"failed": failed.upstream, "error": failed.error or str(failed.status)}
    return Finding(remedy(Cause.UPSTREAM_FAILURE, "replace_upstream"), stage, numbers=numbers)


def _link(evidence: Evidence, stage: str) -> Finding:
    connect = evidence.stages.get("connect", 0.0)
    return Finding(remedy(Cause.NETWORK, "check_link"), stage, numbers={"connect": connect})


def _transit(evidence: Evidence, stage: str) -> Finding:
    """A residual: what the engine didn't report hides in it as well as the network."""
    if evidence.over("connect") + evidence.over("send") >= LINK_SHARE * evidence.over("transit") > 0:
        return _link(evidence, stage)
    return Finding(remedy(Cause.UNKNOWN, "measure_link"), stage, certain=False)


def _engine_queue(evidence: Evidence, stage: str) -> Finding:
    engine, settings = evidence.engine, evidence.engine_settings
    if engine is None:
        return Finding(remedy(Cause.ENGINE_QUEUE, "spread_load"), stage, certain=False)
    if 1 - engine.kv_usage < KV_HEADROOM:
        return Finding(remedy(Cause.ENGINE_QUEUE, "enlarge_kv_cache"), stage)
    # A foreign engine's slots are not known: with others waiting and memory free, they are what is short.
    full = engine.waiting > 0 if settings.max_num_seqs is None else engine.running >= settings.max_num_seqs
    action = "raise_max_num_seqs" if full else "spread_load"
    return Finding(remedy(Cause.ENGINE_QUEUE, action), stage, certain=settings.is_ours or not full)


def _engine_prefill(evidence: Evidence, stage: str) -> Finding:
    preempted = _preempted(evidence, stage, evidence.over(stage))
    if preempted is not None:
        return preempted
    tokens, prompt = evidence.computed_tokens, evidence.ledger.usage.input_tokens
    usual, usual_prompt = evidence.usual("computed_tokens"), evidence.usual("prompt_tokens")
    numbers: Numbers = {
        "computed": tokens,
        "computed_usual": usual,
        "prompt": prompt,
        "cached": evidence.cached_share,
    }
    if tokens is not None and _tokens_explain(evidence, stage, tokens, usual):
        as_long_as_usual = prompt is not None and usual_prompt is not None and prompt < MORE_TOKENS * usual_prompt
        action = "keep_prefix" if as_long_as_usual else "shorten_prompt"
        return Finding(remedy(Cause.LONG_UNCACHED_PROMPT, action), stage, numbers=numbers)
    engine = evidence.engine
    if engine is not None and max(engine.running, engine.batch) > 1:
        return Finding(
            remedy(Cause.PREFILL_SQUEEZED, "tune_batched_tokens"), stage, certain=tokens is not None, numbers=numbers
        )
    if engine is not None and tokens is not None and usual is not None:
        return Finding(remedy(Cause.SLOW_UPSTREAM, "check_device"), stage, numbers=numbers)
    return _unknown(evidence, stage)


def _tokens_explain(evidence: Evidence, stage: str, tokens: int, usual: float | None) -> bool:
    """Whether the computed tokens, each as fast as usual, account for at least half of the prefill's excess."""
    usual_seconds = evidence.usual(stage)
    if usual is None or usual_seconds is None:
        return tokens >= LONG_PROMPT_TOKENS
    if tokens < max(MORE_TOKENS * usual, usual + MIN_MORE_TOKENS):
        return False
    return usual_seconds * (tokens / max(usual, 1.0) - 1) >= HALF * evidence.over(stage)


def _text_work(evidence: Evidence, stage: str) -> Finding:
    return Finding(remedy(Cause.SLOW_UPSTREAM, "free_engine_cpu"), stage)


def _decode(evidence: Evidence, stage: str) -> Finding:
    """The time after the first token: more tokens, or slower ones, and why slower."""
    excess = evidence.suspects[stage]
    if evidence.backpressure >= HALF * excess and evidence.backpressure > 0:
        return _client(evidence, stage)
    preempted = _preempted(evidence, stage, excess)
    if preempted is not None:
        return preempted
    more, slower = evidence.more_tokens, evidence.slower_tokens
    usual = evidence.usual("output_tokens")
    if usual is not None and more > slower and evidence.output_tokens >= MORE_OUTPUT * usual:
        numbers: Numbers = {
            "output": evidence.output_tokens,
            "output_usual": usual,
            "tpot": tpot_of(evidence.row),
        }
        return Finding(remedy(Cause.LONG_OUTPUT, "bound_output"), stage, numbers=numbers)
    return _slow_tokens(evidence, stage, slower)


def _slow_tokens(evidence: Evidence, stage: str, slower: float) -> Finding:
    timings, settings = evidence.timings, evidence.engine_settings
    batch, usual_batch = timings.mean_batch if timings else None, evidence.usual("mean_batch")
    gap, usual_gap = step_gap(evidence.ledger), evidence.usual("step_gap")
    numbers: Numbers = {
        "tpot": tpot_of(evidence.row),
        "tpot_usual": evidence.usual("tpot"),
        "batch": batch,
        "batch_usual": usual_batch,
        "gap": gap,
        "gap_usual": usual_gap,
    }
    if timings is None or batch is None:
        return Finding(remedy(Cause.SLOW_UPSTREAM, "ask_upstream"), stage, certain=False, numbers=numbers)
    if not evidence.baseline.is_enough or slower <= 0:
        return _unknown(evidence, stage)
    if gap is not None and timings.steps and (gap - (usual_gap or 0.0)) * timings.steps >= HALF * slower:
        return Finding(remedy(Cause.SLOW_UPSTREAM, "shrink_token_gap"), stage, numbers=numbers)
    if usual_batch is not None and batch >= MORE * usual_batch:
        return Finding(remedy(Cause.LARGE_BATCH, "lower_max_num_seqs"), stage, numbers=numbers)
    if settings.chunked_prefill is False:
        return Finding(remedy(Cause.LARGE_BATCH, "enable_chunked_prefill"), stage, certain=False, numbers=numbers)
    return Finding(remedy(Cause.SLOW_UPSTREAM, "check_device"), stage, certain=False, numbers=numbers)


def _preempted(evidence: Evidence, stage: str, excess: float) -> Finding | None:
    timings = evidence.timings
    if timings is None or not timings.preempted_ms or timings.preempted_ms / 1e3 < HALF * excess:
        return None
    numbers: Numbers = {
        "preemptions": timings.preemptions,
        "preempted": timings.preempted_ms / 1e3,
    }
    return Finding(remedy(Cause.PREEMPTED, "enlarge_kv_cache"), stage, numbers=numbers)


def _upstream_wait(evidence: Evidence, stage: str) -> Finding:
    """Of a whole answer the wait holds the output's tokens too, and their number can be enough to explain it."""
    wait, usual_wait, usual = evidence.stages[stage], evidence.usual(stage), evidence.usual("output_tokens")
    if not evidence.ledger.stream and usual and usual_wait:
        ratio = evidence.output_tokens / usual
        if ratio >= MORE_OUTPUT and wait <= MORE * ratio * usual_wait:
            per_token = wait / max(evidence.output_tokens, 1)
            numbers: Numbers = {
                "output": evidence.output_tokens,
                "output_usual": usual,
                "tpot": per_token,
            }
            return Finding(remedy(Cause.LONG_OUTPUT, "bound_output"), stage, certain=False, numbers=numbers)
    return Finding(remedy(Cause.SLOW_UPSTREAM, "ask_upstream"), stage, numbers={"tpot": None, "tpot_usual": None})


def _closing(evidence: Evidence, stage: str) -> Finding:
    if evidence.backpressure >= HALF * evidence.over(stage) and evidence.backpressure > 0:
        return _client(evidence, stage)
    return Finding(remedy(Cause.UNKNOWN, "check_gateway"), stage, certain=False, numbers={"lag": evidence.lag})


def _gateway_work(evidence: Evidence, stage: str) -> Finding:
    return Finding(remedy(Cause.UNKNOWN, "check_gateway"), stage, certain=False, numbers={"lag": evidence.lag})


def _host(evidence: Evidence, stage: str) -> Finding:
    return Finding(remedy(Cause.UNKNOWN, "check_host"), stage, certain=False)


def _unknown(evidence: Evidence, stage: str) -> Finding:
    return Finding(remedy(Cause.UNKNOWN, "gather_evidence"), stage, certain=False)


_BY_STAGE: dict[str, Callable[[Evidence, str], Finding]] = {
    "auth": _gateway_work,
    "receive": _receive,
    "route": _gateway_work,
    "gateway_queue": _gateway_queue,
    "failed_attempts": _failed_attempts,
    "connect": _link,
    "send": _link,
    "transit_out": _host,
    "engine_tokenize": _text_work,
    "engine_queue": _engine_queue,
    "engine_prefill": _engine_prefill,
    "engine_decode": _decode,
    "engine_emit": _text_work,
    "transit_back": _host,
    "transit": _transit,
    "upstream_wait": _upstream_wait,
    "relay": _gateway_work,
    "streaming": _decode,
    "closing": _closing,
    "unaccounted": _host,
}
