"""The verdict's judgement: what is slow, against what, how sure that is, and what it says where it can't know."""

from __future__ import annotations

import pytest
from judging import Court, delayed
from ledgers import ELSEWHERE, attempt, ledger, timings, whole

from protocol.timings import EngineState
from tracing.ledger import CLIENT_TOO_SLOW, Ledger, Outcome, Usage
from tracing.observer.failures import died_in

MS = 1_000_000
NO_ANSWER = {"first_event": None, "first_token": None, "first_visible": None, "first_token_written": None}


def cause(court: Court, made: Ledger) -> tuple[str, str | None]:
    found = court.verdict(made)
    return found["cause"], found["stage"]


def cancelled(at_ms: float, **changes) -> Ledger:
    """A stream whose client left before its first token."""
    gone = {"client_gone": at_ms, "upstream_end": at_ms, "finish": at_ms, "last_token": None}
    attempts = [attempt(end=at_ms, upstream_headers=None, upstream_first_byte=None, error="cancelled")]
    fields = {"outcome": Outcome.CLIENT_CANCELLED, "attempts": attempts, "timings": None, **NO_ANSWER, **gone}
    return ledger(**(fields | changes))


# What is slow


def test_the_excess_is_what_each_stage_took_beyond_the_median_and_its_shares_are_whole():
    made = delayed(8.5, 100, delayed(30.5, 300))
    found = Court().knows().verdict(made)
    excess = {one["stage"]: one for one in found["excess"]}
    assert list(excess)[:2] == ["engine_queue", "connect"]
    assert excess["engine_queue"]["ms"] == pytest.approx(300, abs=1)
    assert excess["connect"]["ms"] == pytest.approx(100, abs=1)
    assert sum(one["share"] for one in found["excess"]) == pytest.approx(1, abs=0.001)
    assert excess["engine_queue"]["share"] == pytest.approx(0.75, abs=0.01)


def test_a_request_like_the_others_is_not_slow_and_told_how_it_compares():
    found = Court().knows().verdict(delayed(30.5, 7))
    assert found["cause"] == "none"
    assert "TTFT was 88.5 ms" in found["text"]
    assert "median of 82.0 ms" in found["text"]
    assert "120 streams of m at engine with prompts of 1 to 256 tokens" in found["text"]


def test_beyond_p95_a_tenth_more_than_the_median_is_slow_in_a_class_that_hardly_varies():
    assert cause(Court().knows(), delayed(30.5, 12)) == ("engine_queue", "engine_queue")


def test_in_a_class_that_varies_the_same_delay_is_not_slow():
    court = Court().knows(requests=100).knows(delayed(30.5, 20), 20)
    assert cause(court, delayed(30.5, 12)) == ("none", None)


def test_half_as_much_again_as_the_median_is_slow_however_the_class_varies():
    court = Court().knows(requests=100).knows(delayed(30.5, 200), 20)
    assert cause(court, delayed(30.5, 45)) == ("engine_queue", "engine_queue")


def test_slow_tokens_of_a_short_answer_weigh_what_they_cost_beside_a_wait():
    usage = Usage(input_tokens=31, output_tokens=11, source="usage")
    ends = {"last_token": 180, "upstream_end": 182, "finish": 183}
    made = delayed(30.5, 50, usage=usage, timings=timings(mean_batch=12.0, predicted_n=11), **ends)
    assert made.upstream_end - made.first_token_written < 104 * MS  # the streaming itself took no longer than usual
    assert cause(Court().knows(), made) == ("large_batch", "streaming")


def test_milliseconds_are_never_slow_whatever_the_ratio():
    quick = ledger()
    for name in ("first_token_written", "first_token", "first_visible", "first_event"):
        setattr(quick, name, quick.ingress + MS)
    assert cause(Court().knows(quick), delayed(0.5, 3, quick)) == ("none", None)


def test_slow_tokens_of_a_short_answer_are_found_though_the_streaming_was_short():
    usage = Usage(input_tokens=31, output_tokens=11, source="usage")
    made = ledger(
        last_token=160, upstream_end=162, finish=163, usage=usage, timings=timings(mean_batch=12.0, predicted_n=11)
    )
    found = Court().knows().verdict(made)
    assert (found["cause"], found["action_id"]) == ("large_batch", "lower_max_num_seqs")
    assert "TPOT was 8.0 ms" in found["text"]


def test_a_slow_stream_after_an_ordinary_first_token_is_not_blamed_on_the_first_token():
    made = delayed(180, 300, delayed(10.5, 4), timings=timings(mean_batch=16.0))
    assert cause(Court().knows(), made)[1] == "streaming"


# What it is compared with, and how sure that is


@pytest.mark.parametrize(("requests", "confidence"), [(30, "medium"), (99, "medium"), (100, "high")])
def test_confidence_grows_with_the_baseline(requests, confidence):
    found = Court().knows(requests=requests).verdict(delayed(30.5, 500))
    assert (found["cause"], found["confidence"], found["compared_with"]) == ("engine_queue", confidence, "class")


def test_with_no_baseline_the_largest_stage_is_named_with_low_confidence():
    court = Court().knows(requests=29)
    found = court.explain(delayed(30.5, 500))
    verdict = found["verdict"]
    assert (verdict["cause"], verdict["stage"], verdict["confidence"]) == ("engine_queue", "engine_queue", "low")
    assert (verdict["compared_with"], found["baseline"]["requests"]) == ("none", 29)
    assert verdict["excess"][0] == {"stage": "engine_queue", "ms": 518.0, "share": pytest.approx(518 / 686, abs=0.001)}
    assert "No baseline yet (29 of 30 streams" in verdict["text"]
    assert "more than usual" not in verdict["text"]


def test_a_new_class_is_compared_with_prompts_of_every_size_with_low_confidence():
    made = delayed(
        75.5,
        400,
        usage=Usage(input_tokens=3000, output_tokens=51, source="usage"),
        timings=timings(prompt_n=3000),
    )
    found = Court().knows(ledger(timings=timings(prompt_n=31))).explain(made)
    verdict = found["verdict"]
    assert (verdict["cause"], verdict["stage"], verdict["confidence"]) == (
        "long_uncached_prompt",
        "engine_prefill",
        "low",
    )
    assert (verdict["compared_with"], found["baseline"]["class"]) == ("all_sizes", "le_4096")
    assert found["baseline"]["requests"] == 0
    assert "Its own class is new (0 of 30 requests)" in verdict["text"]


def test_a_long_prompt_is_recognised_without_any_baseline():
    usage = Usage(input_tokens=5000, output_tokens=2, source="usage")
    made = delayed(75.5, 400, usage=usage, timings=timings(prompt_n=5000))
    found = Court().verdict(made)
    assert (found["cause"], found["confidence"]) == ("long_uncached_prompt", "low")


def test_a_cause_with_a_small_part_in_the_excess_is_told_with_low_confidence():
    made = delayed(4.5, 100, delayed(8.5, 101, delayed(12.5, 102, delayed(30.5, 104))))
    found = Court().knows().verdict(made)
    assert found["excess"][0]["share"] < 1 / 3
    assert (found["stage"], found["confidence"]) == ("engine_queue", "low")


# Where it can't know


def test_lag_that_explains_less_than_half_of_the_excess_is_not_the_cause():
    assert cause(Court().knows(), delayed(30.5, 200, loop_lag_ns=90 * MS)) == ("engine_queue", "engine_queue")
    assert cause(Court().knows(), delayed(30.5, 200, loop_lag_ns=110 * MS)) == ("gateway_busy", "engine_queue")


def test_the_usual_lag_explains_nothing():
    court = Court().knows(ledger(loop_lag_ns=110 * MS))
    assert cause(court, delayed(30.5, 200, loop_lag_ns=110 * MS)) == ("engine_queue", "engine_queue")


def test_a_residual_is_the_network_only_when_connecting_was_slow_as_well():
    far = timings(ELSEWHERE)
    court = Court().knows(ledger(timings=far))
    assert cause(court, delayed(80, 300, timings=far)) == ("unknown", "transit")
    assert cause(court, delayed(8.5, 150, delayed(80, 300, timings=far))) == ("network", "transit")


def test_an_engine_that_says_nothing_of_its_state_leaves_the_queue_but_not_its_reason():
    found = Court().knows().verdict(delayed(30.5, 500, timings=timings(engine=None)))
    assert (found["cause"], found["action_id"], found["confidence"]) == ("engine_queue", "spread_load", "medium")
    assert "When it was scheduled" not in found["text"]


def test_slow_tokens_of_an_upstream_that_says_nothing_are_its_own_affair():
    found = Court().knows(ledger(timings=None)).verdict(delayed(180, 300, timings=None))
    assert (found["cause"], found["action_id"], found["confidence"]) == ("slow_upstream", "ask_upstream", "medium")


def test_settings_of_another_engine_are_named_as_its_own():
    full = timings(engine=EngineState(running=64, waiting=9, kv_usage=0.4, batch=64))
    made = delayed(30.5, 500, upstream="vllm-1", timings=full)
    found = Court().knows(ledger(upstream="vllm-1")).verdict(made)
    assert (found["action_id"], found["confidence"]) == ("raise_max_num_seqs", "medium")
    assert "max_num_seqs of vllm-1" in found["action"]
    ours = Court().knows().verdict(delayed(30.5, 500, timings=timings(engine=EngineState(32, 9, 0.4, 32))))
    assert "scheduler.max_num_seqs (now 32)" in ours["action"]


def test_with_little_of_the_kv_cache_free_enlarging_it_comes_first():
    full = timings(engine=EngineState(running=32, waiting=9, kv_usage=0.81, batch=32))
    found = Court().knows().verdict(delayed(30.5, 500, timings=full))
    assert (found["action_id"], found["cause"]) == ("enlarge_kv_cache", "engine_queue")
    assert "Under 20 % of the KV cache was free" in found["text"]


# Slow clients


def test_a_client_that_reads_slowly_is_found_though_the_request_was_not_slow():
    found = Court().knows().verdict(ledger(backpressure_ns=110 * MS))
    assert (found["cause"], found["stage"]) == ("slow_client", "streaming")
    assert "the client got it late" in found["text"]
    assert "unsent" not in found["text"]  # not known of a connection that is gone


def test_a_client_that_has_most_of_the_stream_still_to_take_is_slow():
    made = ledger(unsent_bytes=40_000, response_bytes=60_000)
    found = Court().knows().verdict(made)
    assert (found["cause"], found["confidence"]) == ("slow_client", "medium")
    assert "40000 bytes were unsent" in found["text"].replace(",", "")
    assert Court().knows().verdict(ledger(unsent_bytes=4_000, response_bytes=6_000))["cause"] == "none"


# Answers in one piece


def test_a_whole_answer_is_judged_by_its_end():
    court = Court().knows(whole())
    assert cause(court, whole()) == ("none", None)
    assert cause(court, delayed(30.5, 500, whole())) == ("engine_queue", "engine_queue")


def test_a_long_whole_answer_is_long_not_slow():
    usage = Usage(input_tokens=31, output_tokens=501, source="usage")
    made = delayed(175.5, 900, whole(usage=usage))
    assert cause(Court().knows(whole()), made) == ("long_output", "engine_decode")


def test_a_long_whole_answer_of_an_upstream_that_says_nothing_is_known_by_its_tokens():
    court = Court().knows(whole(timings=None))
    usage = Usage(input_tokens=31, output_tokens=300, source="usage")
    assert cause(court, delayed(185, 800, whole(timings=None, usage=usage))) == ("long_output", "upstream_wait")
    assert cause(court, delayed(185, 800, whole(timings=None))) == ("slow_upstream", "upstream_wait")


# Requests that ended early


def test_a_client_that_left_early_had_no_reason_to_complain():
    found = Court().knows().verdict(cancelled(60.0))
    assert found["cause"] == "none"
    assert found["text"].startswith("The client left after 60.0 ms, in stage upstream_wait.")


def test_a_client_that_left_after_a_long_wait_waited_for_the_upstream():
    found = Court().knows().verdict(cancelled(5000.0))
    assert (found["cause"], found["stage"], found["confidence"]) == ("slow_upstream", "upstream_wait", "medium")
    assert "the wait for a first token was 5.00 s" in found["text"]


def test_a_client_that_left_the_engines_queue_waited_there():
    marks = {"scheduled": None, "prefill_end": None, "first_written": None, "last_token": None}
    told = timings(queue_ms=None, prompt_ms=None, predicted_ms=None, engine=None, **marks)
    found = Court().knows().verdict(cancelled(5000.0, timings=told))
    assert found["text"].startswith("The client left after 5.00 s, in stage engine_queue.")


def test_a_client_that_was_cut_off_did_not_leave():
    made = ledger(outcome=Outcome.CLIENT_CANCELLED, error_code=CLIENT_TOO_SLOW, backpressure_ns=110 * MS)
    found = Court().knows().verdict(made)
    assert found["cause"] == "slow_client"
    assert found["text"].startswith("The gateway cut the client off after ")


def test_a_stream_that_its_client_left_is_judged_by_its_first_token():
    made = delayed(30.5, 500, outcome=Outcome.CLIENT_CANCELLED, client_gone=120)
    assert cause(Court().knows(), made) == ("engine_queue", "engine_queue")


@pytest.mark.parametrize(
    ("changes", "stage"),
    [
        ({"authenticated": None}, "auth"),
        ({"body_read": None}, "receive"),
        ({"routed": None}, "route"),
        ({"admitted": None}, "gateway_queue"),
        ({"attempts": []}, "connect"),
        ({"attempts": [attempt(connected=None)]}, "connect"),
        ({"attempts": [attempt(request_sent=None)]}, "send"),
        ({"timings": None}, "upstream_wait"),
        ({"timings": timings(scheduled=None, prefill_end=None)}, "engine_queue"),
        ({"timings": timings(prefill_end=None)}, "engine_prefill"),
        ({"timings": timings()}, "engine_decode"),
        ({"first_token_written": 81.5, "upstream_end": None}, "streaming"),
        ({"first_token_written": 81.5}, "closing"),
    ],
)
def test_a_request_that_failed_died_in_the_stage_that_was_running(changes, stage):
    assert died_in(ledger(outcome=Outcome.UPSTREAM_ERROR, **(NO_ANSWER | changes))) == stage


def test_failures_need_no_baseline():
    made = ledger(
        outcome=Outcome.UPSTREAM_TIMEOUT, attempts=[attempt(connected=None, error="connect")], timings=None, **NO_ANSWER
    )
    found = Court().verdict(made)
    assert (found["cause"], found["stage"], found["confidence"]) == ("upstream_failure", "connect", "high")
    stalled = ledger(outcome=Outcome.UPSTREAM_TIMEOUT, attempts=[attempt(error="idle")], upstream_end=None)
    assert Court().verdict(stalled)["cause"] == "slow_upstream"
    unread = ledger(outcome=Outcome.UPSTREAM_TIMEOUT, attempts=[attempt(error="total")], backpressure_ns=100 * MS)
    assert Court().verdict(unread)["cause"] == "slow_client"


def test_a_refusal_is_not_slowness():
    for outcome in (Outcome.CLIENT_ERROR, Outcome.AUTH_ERROR, Outcome.RATE_LIMITED):
        found = Court().verdict(ledger(outcome=outcome, error_code="some_code", timings=None))
        assert (found["cause"], found["action_id"], found["confidence"]) == ("none", "mend_request", "high")
        assert "some_code" in found["text"]


def test_a_request_whose_spans_may_still_come_says_so():
    court = Court().knows()
    assert "may still come" in court.explain(ledger(), complete=False)["verdict"]["text"]
    assert "may still come" not in court.explain(ledger())["verdict"]["text"]


def test_the_baseline_is_shown_beside_it():
    found = Court().knows().explain(ledger())["baseline"]
    assert (found["requests"], found["class"], found["compared_with"]) == (120, "le_256", "class")
    assert found["stages"]["engine_queue"] == {
        name: pytest.approx(18, rel=0.02) for name in ("p50_ms", "p95_ms", "p99_ms")
    }
    assert found["figures"]["ttft_ms"]["p50"] == pytest.approx(81.5, rel=0.02)
    assert found["figures"]["output_tokens"]["p50"] == pytest.approx(51, rel=0.02)
