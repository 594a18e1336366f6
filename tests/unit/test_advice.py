"""Advice from the engine's own counts: each rule over a table of windows, and the adviser that judges them."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest
from engine_harness import Harness, chat, done

from backend_engine.advice import MOST, NAMES, RULES, Facts, Usual, Window, advice_on
from backend_engine.adviser import MAX_SAMPLES, MIN_STEPS, STALE_SECONDS, Adviser, facts_of, usual_of
from backend_engine.core.messages import Gauges, Outputs, Ready, Step
from settings.schema import Settings
from tracing.clock import FakeClock

CALM = Window(
    seconds=15, steps=500, forward_ms=14_900, gap_ms=100, prefill_steps=50, budget_steps=0, output_tokens=15_000,
    reports=500, full_reports=0, kv_peak_ratio=0.4, token_gaps=14_000, tpot_p50_ms=30, tpot_p99_ms=40, requests=60,
    ttft_p50_ms=100, prefill_p50_ms=60, prefix_queries=20_000, prefix_hits=12_000, evictions=0,
)  # fmt: skip
USUAL = Usual(tps=1000, ttft_ms=100, prefill_ms=60, hit_ratio=0.6)
FACTS = Facts(
    max_num_seqs=32, max_num_batched_tokens=2048, enable_chunked_prefill=True, async_scheduling=True,
    overlap_token_interval=True, slot_reuse=True, is_cpu=True, kv_pages=1000, most_kv_pages=4096,
)  # fmt: skip
IDLE = {"forward_ms": 7500, "gap_ms": 7500}
JITTERY = {"tpot_p50_ms": 30, "tpot_p99_ms": 300}
SQUEEZED = {"ttft_p50_ms": 200, "prefill_p50_ms": 150, "output_tokens": 18_000, "budget_steps": 20}
WITHOUT_HITS = {"prefix_hits": 2000, "evictions": 300}

TABLE: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any], list[str]]] = [
    ("all is well", {}, {}, {}, []),
    ("nothing is known yet", {}, dict.fromkeys(("tps", "ttft_ms", "prefill_ms", "hit_ratio")), {}, []),
    # KV headroom
    ("headroom of a fifth is enough", {"kv_peak_ratio": 0.80}, {}, {}, []),
    ("less headroom", {"kv_peak_ratio": 0.81}, {}, {}, ["kv_cache"]),
    ("a full cache that has all pages that slots can use", {"kv_peak_ratio": 1.0}, {}, {"kv_pages": 4096}, []),
    # the device idles
    ("it idles, and all is on", IDLE, {}, {}, []),
    ("it idles, the pipeline is off", IDLE, {}, {"async_scheduling": False}, ["async_scheduling"]),
    ("it idles, overlap is off", IDLE, {}, {"overlap_token_interval": False}, ["overlap_token_interval"]),
    ("it idles, slots are rebuilt", IDLE, {}, {"slot_reuse": False}, ["slot_reuse"]),
    ("it hardly idles, all is off", {"forward_ms": 9600, "gap_ms": 400}, {},
     {"async_scheduling": False, "slot_reuse": False}, []),
    ("it idles a twentieth", {"forward_ms": 9500, "gap_ms": 500}, {}, {"slot_reuse": False}, ["slot_reuse"]),
    ("no work at all", {"forward_ms": 0, "gap_ms": 0, "steps": 0}, {}, {"async_scheduling": False}, []),
    # slots
    ("slots are full half of the time", {"full_reports": 250}, {}, {}, ["max_num_seqs"]),
    ("slots are full now and then", {"full_reports": 249}, {}, {}, []),
    ("slots are full and so is the cache", {"full_reports": 500, "kv_peak_ratio": 0.79}, {}, {}, []),
    ("slots are full and the cache is nearly", {"full_reports": 500, "kv_peak_ratio": 0.9}, {}, {}, ["kv_cache"]),
    # jitter
    ("it jitters, chunked prefill is off", JITTERY, {}, {"enable_chunked_prefill": False}, ["enable_chunked_prefill"]),
    ("it jitters, chunked prefill is on", JITTERY, {}, {}, []),
    ("it jitters without prompts", JITTERY | {"prefill_steps": 0}, {}, {"enable_chunked_prefill": False}, []),
    ("too few tokens to tell", JITTERY | {"token_gaps": 99}, {}, {"enable_chunked_prefill": False}, []),
    ("a jitter nobody feels", {"tpot_p50_ms": 1, "tpot_p99_ms": 5}, {}, {"enable_chunked_prefill": False}, []),
    ("no token gap at all", {"tpot_p50_ms": None, "tpot_p99_ms": None}, {}, {"enable_chunked_prefill": False}, []),
    # prefill squeezed by decode
    ("TTFT worse, TPS better", SQUEEZED, {}, {}, ["max_num_batched_tokens"]),
    ("TTFT worse, TPS as usual", SQUEEZED | {"output_tokens": 15_000}, {}, {}, []),
    ("TTFT worse by the queue alone", SQUEEZED | {"prefill_p50_ms": 60}, {}, {}, []),
    ("steps that were not full", SQUEEZED | {"budget_steps": 9}, {}, {}, []),
    ("no steps with prompts", SQUEEZED | {"budget_steps": 0, "prefill_steps": 0}, {}, {}, []),
    ("too few requests", SQUEEZED | {"requests": 9}, {}, {}, []),
    ("no history", SQUEEZED, {"ttft_ms": None}, {}, []),
    # hit rate
    ("hits collapsed by evictions", WITHOUT_HITS, {}, {}, ["prefix_cache"]),
    ("hits collapsed by other prompts", {"prefix_hits": 0}, {}, {}, ["prefix_cache"]),
    ("hits fell by a third", {"prefix_hits": 8000}, {}, {}, []),
    ("there never were hits", {"prefix_hits": 0}, {"hit_ratio": 0.2}, {}, []),
    ("too few tokens looked up", {"prefix_hits": 0, "prefix_queries": 999}, {}, {}, []),
]  # fmt: skip


@pytest.mark.parametrize(("case", "window", "usual", "facts", "names"), TABLE, ids=[row[0] for row in TABLE])
def test_a_window_leads_to_its_advice(case: str, window: Any, usual: Any, facts: Any, names: list[str]) -> None:
    given = advice_on(
        msgspec.structs.replace(CALM, **window),
        msgspec.structs.replace(USUAL, **usual),
        msgspec.structs.replace(FACTS, **facts),
    )
    assert [advice.name for advice in given] == names, case


def test_every_rule_is_in_the_table_and_has_the_name_of_its_metric_label() -> None:
    assert {name for row in TABLE for name in row[4]} == set(NAMES) == {rule.__name__ for rule in RULES}


def test_at_most_two_settings_are_named_and_the_cache_comes_first() -> None:
    facts = msgspec.structs.replace(FACTS, async_scheduling=False, overlap_token_interval=False, slot_reuse=False)
    window = msgspec.structs.replace(CALM, **IDLE, kv_peak_ratio=0.95)
    given = advice_on(window, USUAL, facts)
    assert [advice.name for advice in given] == ["kv_cache", "async_scheduling"]
    assert "(overlap_token_interval and slot_reuse are off as well)" in given[1].text
    assert MOST == 2


def test_full_slots_are_told_beside_an_idle_device() -> None:
    facts = msgspec.structs.replace(FACTS, async_scheduling=False, overlap_token_interval=False)
    window = msgspec.structs.replace(CALM, **IDLE, full_reports=500)
    assert [advice.name for advice in advice_on(window, USUAL, facts)] == ["async_scheduling", "max_num_seqs"]


def test_advice_names_settings_that_exist_and_its_text_has_the_numbers() -> None:
    from settings.catalogue import catalogue

    keys = {key.dotted for key in catalogue()}
    for _, window, usual, facts, names in TABLE:
        for is_cpu in (True, False):
            given = advice_on(
                msgspec.structs.replace(CALM, **window),
                msgspec.structs.replace(USUAL, **usual),
                msgspec.structs.replace(FACTS, **facts, is_cpu=is_cpu),
            )
            assert len(given) == len(names)
            for advice in given:
                assert set(advice.settings) <= keys
                assert all(setting in advice.text for setting in advice.settings)
                assert any(character.isdigit() for character in advice.text)


def test_how_many_slots_are_advised_follows_from_the_room_in_the_cache() -> None:
    def wanted(kv_peak_ratio: float) -> str:
        window = msgspec.structs.replace(CALM, full_reports=500, kv_peak_ratio=kv_peak_ratio)
        return advice_on(window, USUAL, FACTS)[0].text

    assert "to 64 at first" in wanted(0.1)
    assert "to 64 at first" in wanted(0.0)
    assert "to 42 at first" in wanted(0.6)


# The adviser


def ready(**changes: Any) -> Ready:
    facts = {
        "device": "simulated", "dtype": "none", "max_model_len": 1024, "vocab_size": 9, "weight_bytes": 0,
        "kv_pages": 1000, "page_size": 16, "eos_token_ids": (),
    }  # fmt: skip
    return Ready(**facts | changes)


def settings_of(**sections: Any) -> Settings:
    return Settings.model_validate({"state_dir": "/state", **sections})


class Desk:
    """An adviser with a clock that the test moves, and what it published."""

    def __init__(self, **sections: Any) -> None:
        self.clock = FakeClock()
        self.published: dict[str, bool] = {}
        self.adviser = Adviser(settings_of(**sections), self.clock, self.published.__setitem__)
        self.adviser.describe(ready())

    def steps(self, count: int, gap_ms: float = 0, seconds: float = 15, **gauges: int) -> None:
        state = Gauges(**{"running": 8, "waiting": 0, "kv_used": 100, "kv_pages": 1000} | gauges)
        for _ in range(count):
            step = Step(8, 8, 20_000_000, round(gap_ms * 1e6), 0, 0)
            self.adviser.core(Outputs([], [step], state))
        self.clock.advance_ms(seconds * 1e3)
        self.adviser.check()

    def names(self) -> list[str]:
        return [advice.name for advice in self.adviser.given]


def test_advice_is_published_said_once_and_taken_back(caplog) -> None:
    desk = Desk(token_interval={"slot_reuse": False})
    caplog.set_level(logging.WARNING)
    for gap_ms in (20, 20, 0):
        desk.steps(MIN_STEPS, gap_ms)
        told = desk.names()
        assert desk.published == {name: name in told for name in NAMES}
        assert told == (["slot_reuse"] if gap_ms else [])
    assert [record.message for record in caplog.records] == [
        "advice: While there was work the device idled 50% of the time, 20.0 ms between two steps. "
        "Set token_interval.slot_reuse = true."
    ]


def test_too_little_work_is_not_judged_and_what_was_advised_stands() -> None:
    desk = Desk(token_interval={"slot_reuse": False})
    desk.steps(MIN_STEPS, 20)
    desk.steps(MIN_STEPS - 1, 0)
    assert desk.names() == ["slot_reuse"]
    desk.steps(1, 0)
    assert desk.names() == [], "what was counted before still counts"


def test_a_trickle_is_dropped_after_a_while() -> None:
    desk = Desk(token_interval={"slot_reuse": False})
    desk.steps(MIN_STEPS - 1, 20, seconds=STALE_SECONDS)
    desk.steps(1, 20)
    assert (desk.names(), desk.published) == ([], {})


def test_before_a_model_serves_there_is_nothing_to_advise_on() -> None:
    clock = FakeClock()
    adviser = Adviser(settings_of(), clock, lambda _name, _given: None)
    adviser.check()
    assert adviser.report() == {
        "advice": [], "checked_at": None, "window": None,
        "usual": {"tps": None, "ttft_ms": None, "prefill_ms": None, "hit_ratio": None},
    }  # fmt: skip


def test_slots_full_with_requests_waiting_are_seen_in_the_gauges() -> None:
    desk = Desk(scheduler={"max_num_seqs": 8})
    desk.steps(MIN_STEPS, running=8, waiting=3)
    assert desk.names() == ["max_num_seqs"]
    assert desk.adviser.report()["advice"][0]["settings"] == ("scheduler.max_num_seqs",)
    desk.steps(MIN_STEPS, running=8, waiting=0)
    assert desk.names() == []


def test_a_fall_in_hits_is_measured_against_windows_before_by_differences_of_totals() -> None:
    desk = Desk()
    for at in range(1, 5):
        desk.steps(MIN_STEPS, prefix_queries_total=2000 * at, prefix_hits_total=1600 * at, evictions_total=0)
    assert desk.names() == []
    desk.steps(MIN_STEPS, prefix_queries_total=10_000, prefix_hits_total=6500, evictions_total=40)
    assert desk.names() == ["prefix_cache"]
    assert "from 80% to 5%" in desk.adviser.given[0].text
    assert "40 pages evicted" in desk.adviser.given[0].text


def test_token_gaps_and_first_tokens_become_percentiles_and_are_bounded() -> None:
    desk = Desk()
    desk.adviser.tokens(1, None)
    for at in range(2 * MAX_SAMPLES):
        desk.adviser.tokens(1, (at % 100 + 1) * 1e6)
    for ttft_ms in (10, 30, 20):
        desk.adviser.first_token(ttft_ms * 10**6, 5 * 10**6)
    desk.steps(MIN_STEPS)
    window = desk.adviser.report()["window"]
    assert (window["output_tokens"], window["token_gaps"]) == (2 * MAX_SAMPLES + 1, 2 * MAX_SAMPLES)
    assert window["tpot_p50_ms"] == pytest.approx(51, abs=1)
    assert window["tpot_p99_ms"] == pytest.approx(100, abs=1)
    assert (window["ttft_p50_ms"], window["prefill_p50_ms"], window["requests"]) == (20, 5, 3)


def test_a_step_with_prompt_tokens_is_told_from_one_that_only_decodes() -> None:
    desk = Desk(scheduler={"max_num_batched_tokens": 64, "max_num_seqs": 16})
    for batch, tokens in ((8, 8), (8, 40), (8, 64)):
        step = Step(batch, tokens, 1, None, 0, 0)
        desk.adviser.core(Outputs([], [step], Gauges(8, 0, 0, 10)))
    desk.steps(MIN_STEPS)
    window = desk.adviser.report()["window"]
    assert (window["prefill_steps"], window["budget_steps"]) == (2, 1)


def test_what_is_usual_needs_three_windows_that_know_it() -> None:
    assert usual_of([CALM, CALM]) == Usual()
    unknown = msgspec.structs.replace(CALM, ttft_p50_ms=None)
    assert usual_of([CALM, CALM, unknown]) == Usual(tps=1000, prefill_ms=60, hit_ratio=0.6)


def test_a_switch_that_was_asked_for_counts_as_on_whatever_runs() -> None:
    asked = facts_of(settings_of(), ready(async_scheduling=False, slot_reuse=False))
    assert (asked.async_scheduling, asked.slot_reuse, asked.most_kv_pages) == (True, True, 32 * 64)
    off = {"token_interval": {"async_scheduling": False, "slot_reuse": False}}
    assert not facts_of(settings_of(**off), ready()).async_scheduling


# At the engine's door


async def test_the_engine_tells_its_advice_and_publishes_it_as_a_gauge(tmp_path) -> None:
    harness = Harness(tmp_path, key="sk-1", token_interval={"slot_reuse": False})
    call = harness.call(body=chat(max_tokens=2), headers={"authorization": "Bearer sk-1"})
    submit = await harness.submitted(call)
    steps = tuple(Step(1, 1, 20_000_000, 20_000_000, 0, 0) for _ in range(MIN_STEPS))
    harness.core.say(steps=steps)
    harness.core.first(submit, b"a", queue_ms=5, prefill_ms=20)
    harness.core.more(submit, b"b", "length", tokens=2, step_ms=40)
    await done(call)
    harness.frontend.metrics.adviser.check()
    asked = harness.call("/advice", method="GET")
    await done(asked)
    found = asked.json
    assert [advice["settings"] for advice in found["advice"]] == [["token_interval.slot_reuse"]]
    assert (found["window"]["output_tokens"], found["window"]["requests"], found["window"]["tpot_p50_ms"]) == (2, 1, 40)
    assert found["window"]["prefill_p50_ms"] == 20
    assert (harness.metric("advice", advice="slot_reuse"), harness.metric("advice", advice="kv_cache")) == (1, 0)
