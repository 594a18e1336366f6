"""What must be true of a request, worked out from the witnesses of the upstream and of the client, not from our code.

Instants: what the gateway did with an event lies between the moment before the upstream wrote it and the moment after
the client read it. All three clocks are one, so these bounds hold on any machine, however busy, without a tolerance.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from conformance_rig import MODEL, Bench

from loadtest.conformance.client import Answer
from loadtest.scripted.script import Script
from loadtest.scripted.witness import Witness
from tracing.ledger import Attempt, Ledger, Outcome
from tracing.observer.rows import Row

GATEWAY = {"auth", "receive", "route", "gateway_queue", "connect", "send"}
ENGINE_HERE = {"transit_out", "engine_tokenize", "engine_queue", "engine_prefill", "engine_emit", "transit_back"}
ENGINE_BY = {
    "nothing": {"upstream_wait"},
    "here": ENGINE_HERE,
    "elsewhere": {"engine_tokenize", "engine_queue", "engine_prefill", "transit"},
    "llama.cpp": {"engine_prefill", "transit"},
    "span": {"engine_queue", "engine_prefill", "transit"},
}
"""Who told the engine's part -> the stages that can be known."""
NANOSECOND = 1e-9


@dataclass
class Expect:
    """How the request must end, and what must be known of it."""

    outcome: Outcome = Outcome.OK
    status: int = 200
    attempts: tuple[tuple[str, str], ...] = (("a", "ok"),)
    """(upstream, result) of each, as tokenline_attempts_total counts them."""
    told_by: str = "nothing"
    """A key of ENGINE_BY."""
    counted_by: str | None = "usage"
    """What the tokens are counted by: usage, events, None."""
    tokens: int | None = 5
    """Output tokens as the ledger must have them."""
    reached: str = "end"
    """How far the last attempt got: end, sent (no answer), queue (never tried)."""
    rejected: str | None = None
    anomalies: set[str] = field(default_factory=set)


@dataclass
class Played:
    """What came of a case."""

    bench: Bench
    script: Script
    surface: str
    stream: bool
    answer: Answer
    ledger: Ledger
    witnesses: list[Witness]

    @property
    def row(self) -> Row:
        return self.bench.row_of(self.ledger)

    @property
    def last(self) -> Attempt:
        return self.ledger.attempts[-1]

    @property
    def witness(self) -> Witness:
        """Of the last attempt."""
        return self.witnesses[-1]


def in_order(*instants: int) -> None:
    """Instants that were reached follow one another."""
    reached = [instant for instant in instants if instant]
    assert reached == sorted(reached), instants


def check_marks(played: Played, expect: Expect) -> None:
    """Each mark, against what the upstream wrote and the client read."""
    ledger, answer = played.ledger, played.answer
    assert ledger.outcome is expect.outcome
    # A client that had left before the answer began was sent no status.
    assert ledger.status == (0 if answer.left_ns and not answer.headers_ns else expect.status)
    in_order(
        answer.sent_ns, ledger.ingress, ledger.authenticated, ledger.body_read, ledger.routed, ledger.admitted,
        *(mark for a in ledger.attempts for mark in (a.connect_start, a.end)), ledger.finish,
    )  # fmt: skip
    assert [a.upstream for a in ledger.attempts] == [name for name, _ in expect.attempts]
    assert [a.number for a in ledger.attempts] == list(range(1, len(ledger.attempts) + 1))
    if expect.reached == "queue":
        assert not ledger.admitted
        assert not ledger.attempts
        return
    last, witness = played.last, played.witness
    in_order(last.connect_start, last.connected, last.request_sent, witness.body_read_ns)
    in_order(last.connect_start, witness.received_ns, witness.body_read_ns)
    if answer.ended_ns and not answer.left_ns:
        in_order(ledger.finish, answer.ended_ns)
    if answer.left_ns:
        in_order(answer.left_ns, ledger.client_gone, ledger.finish)
        in_order(ledger.client_gone, witness.gone_ns)
    else:
        assert not ledger.client_gone
    if expect.reached == "end":
        in_order(witness.headers_ns, last.upstream_headers, last.upstream_first_byte)
    if played.stream and answer.events and answer.status == 200:
        _check_stream_marks(played)
    else:
        assert not (ledger.first_event or ledger.first_token or ledger.first_visible or ledger.first_token_written)


def _check_stream_marks(played: Played) -> None:
    ledger, answer, witness, last = played.ledger, played.answer, played.witness, played.last
    events = [one for one in witness.writes if one.what != "comment"]
    in_order(events[0].first_ns, last.upstream_first_byte, ledger.first_event)
    in_order(events[0].last_ns, ledger.first_event, answer.events[0].at_ns)
    tokens = witness.token_events
    if not answer.token_events:
        assert not ledger.first_token
        return
    in_order(tokens[0].last_ns, ledger.first_token, ledger.first_token_written, answer.token_events[0].at_ns)
    visible = [event for event in answer.token_events if event.text]
    if written := witness.wrote("token"):
        in_order(written[0].last_ns, ledger.first_visible, visible[0].at_ns if visible else 0)
    reasoned = [event for event in answer.token_events if event.reasoning]
    assert bool(ledger.first_reasoning) == bool(witness.wrote("reasoning"))
    if reasoned:
        in_order(witness.wrote("reasoning")[0].last_ns, ledger.first_reasoning, reasoned[0].at_ns)
    assert ledger.first_token == min(x for x in (ledger.first_reasoning, ledger.first_visible) if x)
    if answer.left_ns:
        in_order(ledger.first_token, ledger.last_token)
        return
    closing = witness.wrote("token", "reasoning", "finish")[-1]
    read = [e for e in answer.events if e.text or e.reasoning or (e.fields.get("choices") or [{}])[0].get("finish_reason")]
    in_order(closing.last_ns, ledger.last_token, read[-1].at_ns)
    assert ledger.token_events == len(tokens)
    if ledger.upstream_end:
        in_order(witness.writes[-1].last_ns, ledger.upstream_end, ledger.finish)


def check_stages(played: Played, expect: Expect) -> None:
    """Each stage by its definition, and the closing of the sum to the nanosecond."""
    ledger, timeline = played.ledger, played.row.timeline
    streamed = played.stream and bool(ledger.first_token_written)
    if not played.stream or not ledger.first_token_written:
        assert timeline.ttft is None
    else:
        assert timeline.ttft == seconds(ledger.ingress, ledger.first_token_written)
    assert timeline.e2e == seconds(ledger.ingress, ledger.finish)
    wanted = _stages(played, expect, streamed)
    assert set(timeline.stages) == set(wanted)
    for name, value in wanted.items():
        assert abs(timeline.stages[name] - value) < NANOSECOND, (name, timeline.stages[name], value)
    assert timeline.total == (timeline.ttft if streamed else timeline.e2e)
    assert timeline.total is not None
    rest = timeline.total - sum(timeline.stages.values())
    if "transit" in wanted:
        assert timeline.unaccounted is None
    else:
        assert timeline.unaccounted is not None
        assert abs(timeline.unaccounted - rest) < NANOSECOND
    if ledger.attempts:
        # Between admission and the first attempt nothing is measured: all that the sum leaves open, to the nanosecond.
        assert abs(rest - seconds(ledger.admitted, ledger.attempts[0].connect_start)) < NANOSECOND
    assert set(timeline.anomalies) == expect.anomalies
    if streamed:
        end = ledger.upstream_end or played.last.end
        assert timeline.after["streaming"] == seconds(ledger.first_token_written, end)
        assert timeline.after["closing"] == seconds(end, ledger.finish)
        assert timeline.ttft is not None
        after = timeline.after["streaming"] + timeline.after["closing"]
        assert abs(timeline.ttft + after - timeline.e2e) < NANOSECOND
        assert set(timeline.after) == _after(played, expect)
    else:
        assert not timeline.after
    _check_tpot(played, expect)


def _stages(played: Played, expect: Expect, streamed: bool) -> dict[str, float]:
    ledger = played.ledger
    gateway = {
        "auth": (ledger.ingress, ledger.authenticated),
        "receive": (ledger.authenticated, ledger.body_read),
        "route": (ledger.body_read, ledger.routed),
        "gateway_queue": (ledger.routed, ledger.admitted or ledger.finish),
    }
    found = {name: seconds(*ends) for name, ends in gateway.items()}
    if expect.reached == "queue":
        return found
    first, last, witness = ledger.attempts[0], played.last, played.witness
    if first is not last:
        found["failed_attempts"] = seconds(first.connect_start, last.connect_start)
    found["connect"] = seconds(last.connect_start, last.connected)
    found["send"] = seconds(last.connected, last.request_sent)
    end = ledger.upstream_end or last.end
    answer = ledger.first_token if streamed else end
    if streamed:
        found["relay"] = seconds(ledger.first_token, ledger.first_token_written)
    else:
        found["closing"] = seconds(end, ledger.finish)
    wait = seconds(last.request_sent, answer)
    engine = {
        "engine_tokenize": seconds(witness.received_ns, witness.queued_ns),
        "engine_queue": seconds(witness.queued_ns, witness.scheduled_ns),
        "engine_prefill": seconds(witness.scheduled_ns, witness.prefill_end_ns),
    }
    if not streamed:
        engine["engine_decode"] = seconds(witness.prefill_end_ns, witness.last_token_ns)
    if expect.told_by == "nothing":
        return found | {"upstream_wait": wait}
    known = ENGINE_BY[expect.told_by] | (set() if streamed else {"engine_decode"})
    found |= {name: value for name, value in engine.items() if name in known}
    if expect.told_by != "here":
        return found | {"transit": wait - sum(value for name, value in engine.items() if name in known)}
    sampled = witness.prefill_end_ns if streamed else witness.last_token_ns
    written = witness.token_events[0].first_ns if streamed else witness.headers_ns
    return found | {
        "transit_out": seconds(last.request_sent, witness.received_ns),
        "engine_emit": seconds(sampled, written),
        "transit_back": seconds(written, answer),
    }


def _after(played: Played, expect: Expect) -> set[str]:
    found = {"streaming", "closing"}
    told_decode = expect.told_by != "nothing" and not played.answer.left_ns
    found |= {"engine_decode"} if told_decode else set()
    return found | ({"client_backpressure"} if played.ledger.backpressure_ns else set())


def _check_tpot(played: Played, expect: Expect) -> None:
    timeline, ledger = played.row.timeline, played.ledger
    usage = ledger.usage
    assert (usage.source, usage.output_tokens) == (expect.counted_by, expect.tokens)
    if not (played.stream and ledger.first_token and expect.tokens is not None and expect.tokens > 1):
        assert timeline.tpot is None
        return
    assert timeline.tpot_count == expect.counted_by
    assert timeline.tpot is not None
    assert abs(timeline.tpot - seconds(ledger.first_token, ledger.last_token) / (expect.tokens - 1)) < NANOSECOND


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
    if expect.rejected:
        count("tokenline_rejections_total", reason=expect.rejected)
    count("tokenline_traces_kept_total")
    return found


def check_spans(played: Played, expect: Expect) -> None:
    """One trace: the gateway's own spans, an attempt each, the engine's below the attempt that it served; none twice."""
    ledger = played.ledger
    spans = played.bench.trace_of(ledger)
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans), [span.name for span in spans]
    assert {span.trace_id for span in spans} == {ledger.trace_id}
    roots = [span for span in spans if span.parent_id not in by_id]
    assert [span.span_id for span in roots] == [ledger.span_id]
    children = [span.name for span in spans if span.parent_id == ledger.span_id]
    own = ["auth", "receive", "route", *(["queue"] if ledger.admitted else [])]
    operation = "chat" if played.surface == "chat" else "text_completion"
    attempts = [f"{operation} {MODEL}"] * len(expect.attempts)
    relay = ["relay"] if ledger.attempts and played.last.upstream_first_byte else []
    assert sorted(children) == sorted([*own, *attempts, *relay])
    for attempt in ledger.attempts:
        span = by_id[attempt.span_id]
        assert (span.start_ns - ledger.wall_ns, span.end_ns - ledger.wall_ns) == (
            attempt.connect_start - ledger.ingress,
            attempt.end - ledger.ingress,
        )
    _check_engine_spans(played, expect, spans)


def _check_engine_spans(played: Played, expect: Expect, spans: list) -> None:
    requests = [span for span in spans if span.name == "llm_request"]
    if expect.told_by == "nothing" and played.script.spans == "none":
        assert not requests
        return
    (request,) = requests
    assert request.parent_id == played.last.span_id
    children = {span.name: span for span in spans if span.parent_id == request.span_id}
    emitted = played.script.spans == "children"
    names = {"here": {"tokenize"}, "elsewhere": {"tokenize"}}.get(expect.told_by, set()) | {"queue", "prefill", "decode"}
    names = {"prefill", "decode"} if expect.told_by == "llama.cpp" else names
    assert set(children) == names
    assert {bool(span.attributes.get("tokenline.derived")) for span in children.values()} == {not emitted}
    witness = played.witness
    if expect.told_by == "here" or emitted:
        placed = children["prefill"]
        wall = played.ledger.wall_ns - played.ledger.ingress
        # An emitted span is placed by the engine's own wall clock, a derived one by the marks of one clock.
        tolerance_ns = 5_000_000 if emitted else 0
        assert abs(placed.start_ns - wall - witness.scheduled_ns) <= tolerance_ns
        assert placed.end_ns - placed.start_ns == witness.prefill_end_ns - witness.scheduled_ns


def check_all(played: Played, expect: Expect, before: dict[str, float]) -> None:
    """Marks, stages, samples, spans."""
    check_marks(played, expect)
    check_stages(played, expect)
    check_samples(played, expect, before)
    check_spans(played, expect)


def seconds(start_ns: int, end_ns: int) -> float:
    """A duration."""
    return (end_ns - start_ns) / 1e9
