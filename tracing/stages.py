"""Stages: the arithmetic of the timeline. A ledger goes in; durations that sum to TTFT (or E2E) come out.

Nothing is clamped and nothing is guessed: a stage whose ends are not both known is absent, and what the known stages
do not explain is `unaccounted`. All values are seconds.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from protocol.timings import EngineMarks, HostIdentity
from tracing.ledger import Attempt, Ledger

GATEWAY_STAGES = ("auth", "receive", "route", "gateway_queue", "failed_attempts", "connect", "send")
ENGINE_STAGES = (
    "transit_out",
    "engine_tokenize",
    "engine_queue",
    "engine_prefill",
    "engine_decode",
    "engine_emit",
    "transit_back",
)
STAGES = (
    *GATEWAY_STAGES,
    *ENGINE_STAGES,
    "transit",
    "upstream_wait",
    "relay",
    "closing",
)
"""Every stage that can be part of a sum, in the order of time."""

IN_BAND, SPAN, HEADER, DERIVED, RELAY = "in_band", "span", "header", "derived", "relay"
"""Who told a stage: the engine's timings in the answer, the span that it emitted, its `Server-Timing` header; derived:
a rest, computed from the others; relay: the gateway's own marks."""

ROUNDING = 1e-6
"""Seconds: a difference of sums below this is floating point, not time."""

DESCRIPTIONS = {
    "auth": "ingress to key verified, on headers alone",
    "receive": "the client's upload: key verified to body read",
    "route": "parsing, choice of upstream, translation",
    "gateway_queue": "waiting for room in the gateway",
    "failed_attempts": "first attempt's start to last attempt's start, back-off included",
    "connect": "pool wait, DNS, TCP and TLS to the upstream (0 when pooled)",
    "send": "connected to request written",
    "transit_out": "request written to seen by the engine (same host)",
    "engine_tokenize": "engine received to handed to its scheduler",
    "engine_queue": "queued to the start of the step with the first prefill chunk",
    "engine_prefill": "that start to the end of the step that sampled the first token",
    "engine_decode": "first token sampled to last token sampled (whole answers; attribution in streams)",
    "engine_emit": "token sampled to first event (or body) about to be written",
    "transit_back": "engine about to write to read by the gateway (same host)",
    "transit": "network and whatever the engine did not report (other host; a residual)",
    "upstream_wait": "request written to first token read; this upstream reports nothing of its inside",
    "relay": "first token read to first token written to the client",
    "streaming": "first token written to the upstream's end",
    "closing": "the upstream's end to the last byte written to the client",
    "client_backpressure": "written bytes not yet taken by the client (inside streaming)",
    "preempted": "put off by the engine in favour of others (inside streaming)",
    "unaccounted": "measured total minus the stages above",
}


_TOLD_BY_ENGINE = frozenset((*ENGINE_STAGES, "preempted"))


class Timeline(msgspec.Struct, frozen=True):
    """What the marks of one request say. Seconds; None where the truth is unknown."""

    ttft: float | None
    """first_token_written - ingress; streams that had a first token only."""
    tpot: float | None
    """(last_token - first_token) / (output_tokens - 1); one choice and more than one token only."""
    tpot_count: str | None
    """usage or events: what output_tokens was counted by."""
    e2e: float | None
    """finish - ingress."""
    engine_ttft: float | None
    """received to first token sampled, by the engine's own clock."""
    stages: dict[str, float]
    """Sum to `total` less `unaccounted`. Of a stream that had a first token: up to TTFT; else: up to the end."""
    total: float | None
    """What the stages sum to: TTFT of a stream, else E2E."""
    unaccounted: float | None
    """total - sum(stages). None where a residual stage makes closure meaningless."""
    after: dict[str, float]
    """After a stream's first token: streaming, closing (they sum to E2E - TTFT), and attributions inside them."""
    overhead: float | None
    """E2E - union of upstream attempt intervals - receive - gateway_queue - back-pressure outside the attempts."""
    placement: str | None
    """exact: engine marks share our clock; durations: they do not; None: the upstream reported nothing."""
    anomalies: tuple[str, ...]
    """Names of intervals that came out negative; shown as they are."""
    origin: str | None = None
    """Who told the engine's stages: IN_BAND, SPAN or HEADER; None where nobody did."""

    @property
    def sources(self) -> dict[str, str]:
        """Stage -> who told it. A residual is derived, whoever told the rest."""
        return {name: self._source(name) for name in (*self.stages, *self.after)}

    def _source(self, stage: str) -> str:
        if stage == "transit":
            return DERIVED
        return (self.origin or RELAY) if stage in _TOLD_BY_ENGINE else RELAY


def _seconds(start: int | None, end: int | None) -> float | None:
    return (end - start) / 1e9 if start and end else None


def union_ns(intervals: Iterable[tuple[int, int]]) -> int:
    """Length of the union of [start, end) intervals, ns."""
    total, reached = 0, 0
    for start, end in sorted(intervals):
        if end > reached:
            total += end - max(start, reached)
            reached = end
    return total


def timeline_of(
    ledger: Ledger, host: HostIdentity, *, origin: str = IN_BAND, engine_ttft: float | None = None
) -> Timeline:
    """The timeline of a closed ledger that was written on `host`.

    `origin` says where `ledger.timings` came from; `engine_ttft` (seconds) is the engine's own figure where it gave one
    beside them.
    """
    first_token_streamed = ledger.stream and bool(ledger.first_token_written)
    ttft = _seconds(ledger.ingress, ledger.first_token_written) if ledger.stream else None
    e2e = _seconds(ledger.ingress, ledger.finish)
    total = ttft if first_token_streamed else e2e

    stages = _gateway_stages(ledger)
    marks, placement = _engine_marks(ledger, host)
    closes = True
    last = ledger.attempts[-1] if ledger.attempts else None
    if last is not None and last.request_sent:
        answer = ledger.first_token if first_token_streamed else _upstream_end(ledger)
        if marks is not None:
            stages |= _engine_stages(ledger, last, marks, answer, whole=not first_token_streamed)
        elif placement == "durations":
            stages |= _residual_stages(ledger, last, answer)
            closes = False
        elif wait := _seconds(last.request_sent, answer):
            stages["upstream_wait"] = wait
    if first_token_streamed:
        _put(stages, "relay", ledger.first_token, ledger.first_token_written)
    elif last is not None:
        _put(stages, "closing", _upstream_end(ledger), ledger.finish)

    after = _after_first_token(ledger) if first_token_streamed else {}
    unaccounted = total - sum(stages.values()) if total is not None and closes else None
    tpot, tpot_count = _tpot(ledger)
    return Timeline(
        ttft=ttft,
        tpot=tpot,
        tpot_count=tpot_count,
        e2e=e2e,
        engine_ttft=_engine_ttft(ledger) if engine_ttft is None else engine_ttft,
        stages=stages,
        total=total,
        unaccounted=unaccounted,
        after=after,
        overhead=_overhead(ledger),
        placement=placement,
        anomalies=_anomalies(stages, after, unaccounted),
        origin=origin if placement is not None else None,
    )


def _anomalies(stages: dict[str, float], after: dict[str, float], unaccounted: float | None) -> tuple[str, ...]:
    found = [name for name, value in (*stages.items(), *after.items()) if value < 0]
    if unaccounted is not None and unaccounted < -ROUNDING:
        found.append("unaccounted")
    return tuple(found)


def _upstream_end(ledger: Ledger) -> int:
    """When the upstream had its last word; of an attempt that failed, when it was given up."""
    return ledger.upstream_end or (ledger.attempts[-1].end if ledger.attempts else 0) or ledger.finish


def _put(stages: dict[str, float], name: str, start: int | None, end: int | None) -> None:
    value = _seconds(start, end)
    if value is not None:
        stages[name] = value


def _gateway_stages(ledger: Ledger) -> dict[str, float]:
    stages: dict[str, float] = {}
    _put(stages, "auth", ledger.ingress, ledger.authenticated)
    _put(stages, "receive", ledger.authenticated, ledger.body_read)
    _put(stages, "route", ledger.body_read, ledger.routed)
    # Whoever is never admitted (refused, or gone) waited to the end.
    _put(stages, "gateway_queue", ledger.routed, ledger.admitted or ledger.finish)
    if ledger.attempts:
        first, last = ledger.attempts[0], ledger.attempts[-1]
        if last is not first:
            _put(stages, "failed_attempts", first.connect_start, last.connect_start)
        # The stage that an attempt died in ends with the attempt.
        _put(stages, "connect", last.connect_start, last.connected or last.end)
        _put(stages, "send", last.connected, last.request_sent or last.end)
    return stages


def _engine_marks(ledger: Ledger, host: HostIdentity) -> tuple[EngineMarks | None, str | None]:
    """Marks on our own clock with `exact`; None with `durations` when only durations can be used; else None, None."""
    timings = ledger.timings
    if timings is None:
        return None, None
    if timings.marks is not None and timings.marks.received and timings.host == host:
        return timings.marks, "exact"
    told = (timings.tokenize_ms, timings.queue_ms, timings.prompt_ms, timings.predicted_ms)
    return None, "durations" if any(ms is not None for ms in told) else None


def _engine_stages(ledger: Ledger, last: Attempt, marks: EngineMarks, answer: int, *, whole: bool) -> dict[str, float]:
    """Engine and transit stages on one clock. What the engine did not reach is absent.

    Of an attempt that was given up before it answered, the engine may know more than the gateway waited for: the stage
    that it was in then ends with the attempt.

    A stream whose first token never got out is summed to its end like a whole answer, but its `first_written` may lie
    before its last token: then emission and transit were not measured, and are left to `unaccounted`.
    """
    given_up = whole and not ledger.upstream_end
    sampled = (marks.last_token or marks.prefill_end) if whole else marks.prefill_end
    path = [
        ("transit_out", last.request_sent, marks.received),
        ("engine_tokenize", marks.received, marks.queued),
        ("engine_queue", marks.queued, marks.scheduled),
        ("engine_prefill", marks.scheduled, marks.prefill_end),
    ]
    if whole:
        path.append(("engine_decode", marks.prefill_end, marks.last_token))
    written_early = whole and marks.last_token and marks.first_written and marks.first_written < marks.last_token
    if not written_early:
        path += [("engine_emit", sampled, marks.first_written), ("transit_back", marks.first_written, answer or None)]
    stages: dict[str, float] = {}
    for name, start, end in path:
        if given_up and start and (not end or end > answer):
            if start < answer:
                stages[name] = (answer - start) / 1e9
            break
        _put(stages, name, start, end)
    return stages


def _residual_stages(ledger: Ledger, last: Attempt, answer: int) -> dict[str, float]:
    """Another host's durations, and one `transit` that is the rest by construction.

    Where they are longer than the gateway waited (it gave up, the engine went on), it is unknown what was waited for.
    """
    timings = ledger.timings
    wait = _seconds(last.request_sent, answer)
    if timings is None or wait is None:
        return {}
    whole = not (ledger.stream and ledger.first_token_written)
    durations = {
        "engine_tokenize": timings.tokenize_ms,
        "engine_queue": timings.queue_ms,
        "engine_prefill": timings.prompt_ms,
        "engine_decode": timings.predicted_ms if whole else None,
    }
    stages = {name: ms / 1e3 for name, ms in durations.items() if ms is not None}
    rest = wait - sum(stages.values())
    if rest < 0 and not ledger.upstream_end and whole:
        return {"upstream_wait": wait}
    return stages | {"transit": rest}


def _tpot(ledger: Ledger) -> tuple[float | None, str | None]:
    usage = ledger.usage
    span = _seconds(ledger.first_token, ledger.last_token)
    if not ledger.stream or ledger.choices != 1 or span is None:
        return None, None
    if usage.output_tokens is None:
        tokens, count = ledger.token_events, "events"
    else:
        hidden = usage.reasoning_tokens or 0 if _reasoning_hidden(ledger) else 0
        tokens, count = usage.output_tokens - hidden, usage.source or "usage"
    return (span / (tokens - 1), count) if tokens > 1 else (None, None)


def _reasoning_hidden(ledger: Ledger) -> bool:
    """Reasoning that was counted but not streamed: the first token seen was a visible one."""
    streamed = ledger.first_reasoning or ledger.first_token != ledger.first_visible
    return bool(ledger.usage.reasoning_tokens) and not streamed


def _engine_ttft(ledger: Ledger) -> float | None:
    timings = ledger.timings
    if timings is None:
        return None
    if timings.marks is not None:
        return _seconds(timings.marks.received, timings.marks.prefill_end)
    parts = (timings.tokenize_ms, timings.queue_ms, timings.prompt_ms)
    known = [ms for ms in parts if ms is not None]
    return sum(known) / 1e3 if len(known) == len(parts) else None


def _after_first_token(ledger: Ledger) -> dict[str, float]:
    after: dict[str, float] = {}
    _put(after, "streaming", ledger.first_token_written, _upstream_end(ledger))
    _put(after, "closing", _upstream_end(ledger), ledger.finish)
    if ledger.timings is not None and ledger.timings.predicted_ms is not None:
        after["engine_decode"] = ledger.timings.predicted_ms / 1e3
    if ledger.timings is not None and ledger.timings.preempted_ms:
        after["preempted"] = ledger.timings.preempted_ms / 1e3
    if ledger.backpressure_ns:
        after["client_backpressure"] = ledger.backpressure_ns / 1e9
    return after


def _overhead(ledger: Ledger) -> float | None:
    e2e = _seconds(ledger.ingress, ledger.finish)
    if e2e is None or not ledger.attempts:
        return None
    busy = union_ns((a.connect_start, a.end or ledger.finish) for a in ledger.attempts if a.connect_start)
    receive = _seconds(ledger.authenticated, ledger.body_read) or 0.0
    queue = _seconds(ledger.routed, ledger.admitted) or 0.0
    # Back-pressure while an attempt ran lies inside its interval; only what can have come after it is left to subtract.
    ended = ledger.attempts[-1].end
    slow_client = min(ledger.backpressure_ns, ledger.finish - ended) if ended else 0
    return e2e - (busy + slow_client) / 1e9 - receive - queue
