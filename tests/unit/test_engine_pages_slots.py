"""Pages and slots: nothing is lost, nothing has two owners, whatever is taken, given back, aborted or broken."""

from __future__ import annotations

import pytest
from engine_support import settings_of, simulated
from hypothesis import given, settings
from hypothesis import strategies as st

from backend_engine.core.pages import Pages
from backend_engine.core.slots import Slots


@given(st.integers(1, 40), st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=60))
def test_free_and_used_pages_are_all_pages_and_no_page_has_two_owners(
    count: int, actions: list[tuple[bool, int]]
) -> None:
    pages = Pages(count, page_size=16)
    owned: list[list[int]] = []
    for takes, number in actions:
        if takes and pages.can_take(number):
            owned.append(pages.take(number))
        elif not takes and owned:
            pages.give_back(owned.pop(number % len(owned)))
        held = [page for owner in owned for page in owner]
        assert len(set(held)) == len(held)
        assert pages.used == len(held)
        assert pages.free + pages.used == count
        pages.check()


def test_pages_refuse_what_would_break_them() -> None:
    pages = Pages(4, page_size=16)
    taken = pages.take(3)
    with pytest.raises(RuntimeError, match="2 KV pages were asked for; 1 are free and 0 cached of 4"):
        pages.take(2)
    pages.give_back(taken)
    with pytest.raises(RuntimeError, match="given back twice"):
        pages.give_back(taken[:1])
    with pytest.raises(ValueError, match="0 pages"):
        Pages(0, page_size=16)


@pytest.mark.parametrize(("tokens", "expected"), [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_pages_needed_are_rounded_up(tokens: int, expected: int) -> None:
    assert Pages(4, page_size=16).needed(tokens) == expected


def test_a_slot_is_given_back_by_its_owner_once() -> None:
    slots = Slots(2)
    slot = slots.take("a")
    slots.take("b")
    assert not slots.can_take()
    with pytest.raises(RuntimeError, match="all 2 slots"):
        slots.take("c")
    slots.give_back(slot)
    with pytest.raises(RuntimeError, match="does not belong"):
        slots.give_back(slot)
    slots.check()


ACTIONS = st.one_of(
    st.tuples(st.just("submit"), st.integers(1, 60), st.integers(1, 40)),
    st.tuples(st.just("abort"), st.integers(0, 30), st.just(0)),
    st.tuples(st.just("turn"), st.integers(1, 4), st.just(0)),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(ACTIONS, max_size=40), st.booleans(), st.integers(1, 5))
def test_after_random_arrivals_and_aborts_everything_is_free_at_idle(
    actions: list[tuple[str, int, int]], is_chunked: bool, slots: int
) -> None:
    driver, _ = simulated(
        settings_of(
            engine={"device": "simulated", "page_size": 4, "max_model_len": 80, "cpu_kv_cache_gib": 200 * 2048 / 2**30},
            scheduler={"max_num_seqs": slots, "max_num_batched_tokens": 16, "enable_chunked_prefill": is_chunked},
        )
    )
    names: list[str] = []
    for action, first, second in actions:
        if action == "submit":
            names.append(f"r{len(names)}")
            driver.submit(names[-1], [65] * first, second)
        elif action == "abort":
            driver.abort(f"r{first}")
        else:
            for _ in range(first):
                driver.turn()
        driver.core.slots.check()
        driver.core.pages.check()
    driver.run()

    driver.assert_all_free()
    for name in names:
        finished = driver.finished(name)
        assert finished.output_tokens == len(driver.tokens(name))
        assert finished.reason in {"length", "abort"}
    if driver.said:
        last = driver.said[-1].gauges
        assert (last.running, last.waiting, last.kv_used) == (0, 0, 0)
