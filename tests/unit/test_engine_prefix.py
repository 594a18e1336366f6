"""Prefix cache and preemption: what is found, what is counted, who is put out, and that it all comes back."""

from __future__ import annotations

from typing import Any

import pytest
from engine_support import ORDERS, Driver, settings_of, simulated
from hypothesis import given, settings
from hypothesis import strategies as st

from backend_engine.core.pages import Pages
from backend_engine.core.prefix import PageKeys
from tracing.clock import FakeClock

MS = 1_000_000
TIMES = {"forward_ms": 10, "prefill_token_us": 100, "decode_token_us": 1000}
PAGE = 4


def start(order: str = "in order", pages: int = 100, **scheduler: Any) -> tuple[Driver, FakeClock]:
    return simulated(
        settings_of(
            engine={
                "device": "simulated",
                "page_size": PAGE,
                "max_model_len": 40,
                "cpu_kv_cache_gib": pages * PAGE * 2048 / 2**30,
                "gpu_memory_utilization": 1,
            },
            simulated=TIMES,
            scheduler={"max_num_seqs": 8, "queue_warn_ms": 1e9} | scheduler,
            token_interval=ORDERS[order],
        )
    )


# -- keys and pages --------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 2), min_size=8, max_size=12), st.lists(st.integers(0, 2), min_size=8, max_size=12))
def test_keys_are_equal_just_as_far_as_all_tokens_before_are(one: list[int], other: list[int]) -> None:
    keys = [PageKeys(tokens, PAGE).first(2) for tokens in (one, other)]
    for page in (1, 2):
        assert (keys[0][page - 1] == keys[1][page - 1]) == (one[: page * PAGE] == other[: page * PAGE])


def test_keys_of_a_sequence_that_grows_are_those_of_the_whole() -> None:
    tokens = [1, 2, 3, 4]
    keys = PageKeys(tokens, PAGE)
    keys.first(1)
    tokens += [5, 6, 7, 8]
    assert keys.first(2) == PageKeys([1, 2, 3, 4, 5, 6, 7, 8], PAGE).first(2)


ACTIONS = st.lists(st.tuples(st.sampled_from(["take", "find", "give", "register"]), st.integers(0, 7)), max_size=80)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 12), ACTIONS)
def test_free_cached_and_used_pages_are_all_pages_whatever_happens(count: int, actions: list[tuple[str, int]]) -> None:
    """Keys are chains of one letter: owner n writes the beginning of the n-th alphabet."""
    pages = Pages(count, PAGE)
    owners: list[list[int]] = []
    content: dict[int, bytes] = {}
    for action, number in actions:
        if action == "take" and pages.can_take(number):
            taken = pages.take(number)
            for page in taken:
                content.pop(page, None)
            owners.append(taken)
        elif action == "find":
            found = pages.find([b"%d.%d" % (number % 2, at) for at in range(4)])
            assert [content[page] for page in found] == [b"%d.%d" % (number % 2, at) for at in range(len(found))]
            pages.share(found)
            owners.append(found)
        elif action == "give" and owners:
            pages.give_back(owners.pop(number % len(owners)))
        elif action == "register" and owners:
            for at, page in enumerate(owners[number % len(owners)]):
                if page not in content:
                    content[page] = b"%d.%d" % (number % 2, at)
                    pages.register(page, content[page])
        pages.check()
        held = {page for owner in owners for page in owner}
        assert pages.used == len(held)
        assert pages.free + pages.cached + pages.used == count
        assert pages.can_take(pages.free + pages.cached)
        assert not pages.can_take(pages.free + pages.cached + 1)
    while owners:
        pages.give_back(owners.pop())
    assert pages.used == 0


def test_the_page_not_asked_for_longest_is_evicted_first_and_a_chain_from_its_end() -> None:
    pages = Pages(4, PAGE)
    old, new = pages.take(2), pages.take(2)
    for owner, name in ((old, b"old"), (new, b"new")):
        for at, page in enumerate(owner):
            pages.register(page, name + b"%d" % at)
        pages.give_back(owner)
    pages.share(pages.find([b"old0", b"old1"]))
    pages.give_back(old)
    assert pages.take(1) == [new[1]]
    assert pages.take(1) == [new[0]]
    assert pages.take(1) == [old[1]]
    assert pages.find([b"old0", b"old1"]) == old[:1]
    assert pages.evictions == 3


# -- prefixes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
def test_a_prompt_that_begins_like_one_before_computes_only_the_rest(order: str) -> None:
    driver, _ = start(order)
    driver.submit("a", [65] * 18, 1)
    driver.run()
    driver.submit("b", [65] * 18 + [66] * 4, 3)
    driver.run()
    assert driver.scheduled("a").cached_tokens == 0
    b = driver.scheduled("b")
    assert b.cached_tokens == 16
    assert b.prefill_end_ns - b.scheduled_ns == (10 + 6 * 0.1) * MS
    gauges = driver.said[-1].gauges
    assert (gauges.prefix_queries_total, gauges.prefix_hits_total) == (18 + 22, 16)
    assert gauges.kv_used == 0
    assert gauges.kv_cached == 6  # of b: 24 tokens were computed
    driver.close()


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    driver, _ = start()
    for name in "ab":
        driver.submit(name, [65] * 16, 1)
        driver.run()
    assert driver.scheduled("b").cached_tokens == 12
    assert driver.tokens("a") == driver.tokens("b")


def test_an_answer_is_found_by_the_next_turn_of_its_conversation() -> None:
    driver, _ = start()
    driver.submit("a", [65] * 6, 10)
    driver.run()
    driver.submit("b", [65] * 6 + driver.tokens("a") + [66], 2)
    driver.run()
    assert driver.scheduled("b").cached_tokens == 12  # 15 of the 16 tokens were computed
    driver.close()


def test_prompts_of_one_step_share_nothing_yet_and_both_are_right() -> None:
    driver, _ = start()
    driver.submit("a", [65] * 12, 6)
    driver.submit("b", [65] * 12, 6)
    driver.run()
    assert driver.scheduled("b").cached_tokens == 0
    assert driver.tokens("a") == driver.tokens("b")
    driver.submit("c", [65] * 12, 6)
    driver.run()
    assert driver.scheduled("c").cached_tokens == 8
    driver.close()


def test_a_prefix_cache_that_is_off_finds_and_counts_nothing() -> None:
    driver, _ = start(enable_prefix_caching=False)
    for name in "ab":
        driver.submit(name, [65] * 16, 1)
        driver.run()
    gauges = driver.said[-1].gauges
    assert driver.scheduled("b").cached_tokens == 0
    assert (gauges.prefix_queries_total, gauges.prefix_hits_total, gauges.kv_cached) == (0, 0, 0)


# -- preemption ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("order", ORDERS)
def test_when_pages_run_out_the_newest_is_put_out_and_its_answer_is_what_it_would_have_been(
    order: str, enable_prefix_caching: bool
) -> None:
    alone, _ = start()
    for number, name in enumerate("abcd"):
        alone.submit(name, [65 + number] * 9, 28)
        alone.run()

    driver, _ = start(order, pages=22, enable_prefix_caching=enable_prefix_caching)
    for number, name in enumerate("abcd"):
        driver.submit(name, [65 + number] * 9, 28)
    driver.run()
    ended = {name: driver.finished(name) for name in "abcd"}
    assert {name: driver.tokens(name) for name in "abcd"} == {name: alone.tokens(name) for name in "abcd"}
    assert ended["a"].preemptions == 0
    assert ended["d"].preemptions > 0
    assert sum(end.preemptions for end in ended.values()) == driver.said[-1].gauges.preemptions_total
    assert ended["a"].ended_ns <= ended["b"].ended_ns <= ended["c"].ended_ns <= ended["d"].ended_ns
    d = ended["d"]
    assert d.steps == d.output_tokens - 1 == 27
    assert d.preempted_at_ns[0] > driver.scheduled("d").prefill_end_ns
    assert 0 < d.preempted_ns < d.last_token_ns - driver.scheduled("d").prefill_end_ns  # type: ignore[operator]
    # counted at the first admission, however often it was admitted again
    assert driver.said[-1].gauges.prefix_queries_total == (4 * 9 if enable_prefix_caching else 0)
    assert driver.said[-1].gauges.prefix_hits_total == 0
    driver.close()


def test_the_time_out_of_the_batch_is_from_being_put_out_to_the_step_that_takes_it_up_again() -> None:
    driver, _ = start(pages=14, enable_prefix_caching=False)
    driver.submit("a", [65] * 9, 24)
    driver.submit("b", [66] * 9, 24)
    driver.run()
    b = driver.finished("b")
    assert b.preemptions == 1
    assert b.preempted_ns == driver.finished("a").ended_ns - b.preempted_at_ns[0]


def test_a_request_that_is_out_can_be_aborted() -> None:
    driver, _ = start(pages=14)
    driver.submit("a", [65] * 9, 24)
    driver.submit("b", [66] * 9, 24)
    while driver.said == [] or driver.said[-1].gauges.preemptions_total == 0:
        driver.turn()
    driver.abort("b")
    driver.run()
    assert driver.finished("b").reason == "abort"
    assert driver.finished("b").preempted_ns > 0
    assert driver.finished("a").reason == "length"
    driver.close()
