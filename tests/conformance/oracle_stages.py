"""Each stage by its definition, and the closing of the sum to the nanosecond."""

from __future__ import annotations

from expectation import ENGINE_BY, HEADER_ROUNDING, NANOSECOND, Expect, Played, seconds


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
        exact = NANOSECOND if expect.told_by != "header" else HEADER_ROUNDING
        assert abs(timeline.stages[name] - value) < exact, (name, timeline.stages[name], value)
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
    known = ENGINE_BY[expect.told_by] | (set() if streamed or expect.told_by == "header" else {"engine_decode"})
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
    told_decode = expect.told_by not in ("nothing", "header") and not played.answer.left_ns
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
