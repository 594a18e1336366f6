"""The loop over the simulated device with a clock that the test owns: who runs when, and every interval to the ns."""

from __future__ import annotations

import logging

import pytest
from engine_support import ORDERS, BreakingDevice, Driver, settings_of, simulated

from backend_engine.core.messages import Sampling, Shutdown, Submit
from backend_engine.devices.simulated import ALPHABET, EOS
from tracing.clock import FakeClock

MS = 1_000_000
TIMES = {"forward_ms": 10, "prefill_token_us": 100, "decode_token_us": 1000}


def start(times: dict[str, float] = TIMES, **sections: dict[str, object]) -> tuple[Driver, FakeClock]:
    return simulated(
        settings_of(engine={"device": "simulated"} | sections.pop("engine", {}), simulated=times, **sections)
    )


# -- times -----------------------------------------------------------------------------------------------------------


def test_every_interval_of_a_request_is_known_to_the_nanosecond() -> None:
    driver, clock = start()
    queued_ns = clock.mono_ns()
    driver.submit("a", [65] * 50, 4)
    clock.advance_ms(3)
    driver.turn()
    first = driver.scheduled("a")
    assert first.scheduled_ns - queued_ns == 3 * MS
    assert first.prefill_end_ns - first.scheduled_ns == 15 * MS  # 10 + 50 * 0.1
    clock.advance_ms(2)
    driver.turn()
    clock.advance_ms(0.5)
    driver.run()

    last = driver.finished("a")
    assert last.last_token_ns is not None
    decode_ns = last.last_token_ns - first.prefill_end_ns
    assert decode_ns == (3 * 11 + 2.5) * MS
    assert last.gap_ns == 2.5 * MS
    assert (last.steps, last.batch_sum, last.output_tokens) == (3, 3, 4)
    assert last.ended_ns == last.last_token_ns
    assert last.scheduled_ns == first.scheduled_ns
    queue_ns, prefill_ns = first.scheduled_ns - queued_ns, first.prefill_end_ns - first.scheduled_ns
    assert queue_ns + prefill_ns + decode_ns == last.last_token_ns - queued_ns


def test_prefill_is_timed_from_the_first_chunk_to_the_last() -> None:
    driver, clock = start(scheduler={"max_num_batched_tokens": 40})
    queued_ns = clock.mono_ns()
    driver.submit("a", [65] * 100, 1)
    driver.run()
    first = driver.scheduled("a")
    assert first.prefill_chunks == 3
    assert first.scheduled_ns == queued_ns
    assert first.prefill_end_ns - queued_ns == (3 * 10 + 100 * 0.1) * MS
    assert driver.finished("a").steps == 0


def test_the_token_gap_is_measured_between_steps_and_unknown_after_idleness() -> None:
    driver, clock = start()
    driver.submit("a", [65], 3)
    driver.turn()
    clock.advance_ms(4)
    driver.run()
    clock.advance_ms(1000)
    driver.submit("b", [65], 2)
    driver.run()
    assert [step.gap_ns for step in driver.steps] == [None, 4 * MS, 0, None, 0]


def test_a_request_that_waited_while_the_last_step_ran_makes_the_gap_known() -> None:
    driver, clock = start()
    driver.submit("a", [65], 1)
    queued_ns = clock.mono_ns() + 5 * MS
    driver.turn()  # ends 10.1 ms later
    clock.advance_ms(2)
    driver.core.take(Submit("b", [65], Sampling(max_tokens=1), queued_ns))
    driver.run()
    assert [step.gap_ns for step in driver.steps] == [None, 2 * MS]


def test_steps_start_no_earlier_than_the_one_before_ends() -> None:
    driver, clock = start()
    core = driver.core
    driver.submit("a", [65], 5)
    first, second = (core.launch(core.ready()) for _ in range(2))  # type: ignore[arg-type]
    assert first is not None
    assert second is not None
    launched_ns = clock.mono_ns()
    core.commit(first)
    core.commit(second)
    said = core.report()
    assert said is not None
    assert [output.step_end_ns - launched_ns for output in said.outputs] == [10.1 * MS, 21.1 * MS]
    assert said.steps[1].gap_ns == 0


def test_the_state_when_scheduled_travels_with_the_first_token() -> None:
    driver, _ = start(scheduler={"max_num_seqs": 2}, engine={"page_size": 16, "max_model_len": 160})
    driver.submit("a", [65] * 16, 16)
    driver.turn()
    driver.submit("b", [65] * 16, 16)
    driver.submit("c", [65] * 16, 16)
    driver.run()
    state = driver.scheduled("b").state
    assert (state.running, state.waiting, state.batch) == (2, 1, 2)
    assert state.kv_usage == 4 / 20


# -- who runs when ---------------------------------------------------------------------------------------------------


def test_eight_requests_at_once_are_one_batch() -> None:
    driver, _ = start()
    for name in "abcdefgh":
        driver.submit(name, [65, 66], 3)
    driver.run()
    assert [step.batch for step in driver.steps] == [8, 8, 8]
    assert [step.forward_ns for step in driver.steps] == [11.6 * MS, 18 * MS, 18 * MS]
    assert driver.finished("a").batch_sum == 16


def test_decode_comes_first_and_prompts_share_what_is_left_of_the_budget() -> None:
    driver, _ = start(scheduler={"max_num_seqs": 8, "max_num_batched_tokens": 10})
    for name in "ab":
        driver.submit(name, [65] * 5, 4)
    driver.submit("long", [65] * 21, 2)
    driver.run()
    assert [step.tokens for step in driver.steps] == [10, 10, 10, 7, 1]
    assert [step.batch for step in driver.steps] == [2, 3, 3, 3, 1]
    assert driver.scheduled("long").prefill_chunks == 3


def test_without_chunks_a_prompt_is_one_step_and_one_longer_than_the_budget_runs_alone() -> None:
    driver, _ = start(scheduler={"max_num_seqs": 8, "max_num_batched_tokens": 10, "enable_chunked_prefill": False})
    driver.submit("a", [65] * 6, 3)
    driver.submit("huge", [65] * 40, 1)
    driver.submit("b", [65] * 4, 1)
    driver.run()
    assert [step.tokens for step in driver.steps] == [6, 41, 5]
    assert all(driver.scheduled(name).prefill_chunks == 1 for name in ("a", "huge", "b"))


def test_requests_are_served_in_order_and_one_that_waits_for_pages_holds_its_place() -> None:
    # 10 pages of 4 tokens
    driver, _ = start(
        engine={
            "page_size": 4,
            "max_model_len": 40,
            "cpu_kv_cache_gib": 40 * 2048 / 2**30,
            "gpu_memory_utilization": 1,
        },
        scheduler={"max_num_seqs": 8},
    )
    driver.submit("a", [65] * 20, 5)  # 6 pages
    driver.submit("big", [66] * 20, 10)  # 6 pages: must wait for a's
    driver.submit("small", [67] * 2, 2)  # would fit, and waits its turn
    driver.run()
    assert driver.core.pages.count == 10
    a, big, small = (driver.scheduled(name).scheduled_ns for name in ("a", "big", "small"))
    assert a < big
    assert big == small
    ended = driver.finished("a").last_token_ns
    assert ended is not None
    assert big == ended


def test_out_of_slots_requests_queue() -> None:
    driver, _ = start(scheduler={"max_num_seqs": 2})
    for name in "abc":
        driver.submit(name, [65], 3)
    driver.turn()
    assert driver.said[-1].gauges.running == 2
    assert driver.said[-1].gauges.waiting == 1
    driver.run()
    assert driver.scheduled("c").scheduled_ns == driver.finished("a").last_token_ns


def test_an_idle_engine_waits_for_company_and_a_running_batch_is_never_delayed() -> None:
    driver, clock = start(model={"batch_wait_ms": 8})
    driver.submit("a", [65], 5)
    assert driver.turn() is not None  # gauges alone
    assert driver.steps == []
    assert driver.core.wait_ns() == 8 * MS
    clock.advance_ms(5)
    driver.submit("b", [65], 5)
    driver.turn()
    assert driver.core.wait_ns() == 3 * MS
    clock.advance_ms(3)
    driver.turn()
    assert [step.batch for step in driver.steps] == [2]
    driver.submit("c", [65], 1)
    driver.turn()
    assert [step.batch for step in driver.steps] == [2, 3]


def test_a_full_house_does_not_wait_for_more_company() -> None:
    driver, _ = start(model={"batch_wait_ms": 8}, scheduler={"max_num_seqs": 2})
    driver.submit("a", [65], 1)
    driver.submit("b", [65], 1)
    assert driver.core.wait_ns() == 0
    driver.turn()
    assert [step.batch for step in driver.steps] == [2]


def test_a_long_wait_in_the_queue_is_logged_once_with_the_request_and_the_state(
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver, _ = start(scheduler={"max_num_seqs": 1, "queue_warn_ms": 25})
    driver.submit("runner", [65], 8)
    driver.submit("waiter", [65], 1)
    with caplog.at_level(logging.WARNING):
        driver.run()
    lines = [record.getMessage() for record in caplog.records if "queue" in record.getMessage()]
    assert len(lines) == 1
    assert "waiter" in lines[0]
    assert "1 running in 1 slots, 1 waiting" in lines[0]


def test_a_budget_below_the_slots_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"max_num_batched_tokens = 4 .*max_num_seqs = 8"):
        start(scheduler={"max_num_seqs": 8, "max_num_batched_tokens": 4})


# -- ends ------------------------------------------------------------------------------------------------------------


def test_an_abort_frees_slot_and_pages_before_the_next_step_and_says_what_was_wasted() -> None:
    driver, clock = start()
    driver.submit("a", [65], 100)
    driver.submit("b", [65], 3)
    driver.turn()
    asked_ns = clock.mono_ns() + 1
    driver.turn()
    driver.turn()
    driver.abort("a", asked_ns)
    assert (driver.core.slots.used, driver.core.pages.used) == (0, 0)
    effect_ns = clock.mono_ns()
    said = driver.turn()
    assert said is not None
    assert said.gauges.running == 0
    finished = driver.finished("a")
    assert (finished.reason, finished.output_tokens, finished.wasted_tokens) == ("abort", 3, 2)
    assert finished.ended_ns == effect_ns


def test_a_queued_request_can_be_aborted_and_an_unknown_one_is_ignored() -> None:
    driver, _ = start(scheduler={"max_num_seqs": 1})
    driver.submit("a", [65], 2)
    driver.submit("b", [65], 2)
    driver.abort("b")
    driver.abort("nobody")
    driver.run()
    finished = driver.finished("b")
    assert (finished.reason, finished.output_tokens, finished.last_token_ns) == ("abort", 0, None)
    assert finished.scheduled_ns is None
    assert driver.finished("a").reason == "length"
    assert "nobody" not in driver.outputs


def test_gauges_are_published_when_all_requests_abort() -> None:
    driver, _ = start()
    for name in "abc":
        driver.submit(name, [65], 50)
    driver.turn()
    for name in "abc":
        driver.abort(name)
    said = driver.turn()
    assert said is not None
    assert (said.gauges.running, said.gauges.waiting, said.gauges.kv_used) == (0, 0, 0)
    assert driver.core.wait_ns() is None
    assert driver.turn() is None


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "code", "says"),
    [
        ([], 4, "invalid_prompt", "no tokens"),
        ([65, 257], 4, "invalid_prompt", "257"),
        ([-1], 4, "invalid_prompt", "-1"),
        ([65], 0, "invalid_prompt", "max_tokens = 0"),
        ([65] * 64, 4, "context_length_exceeded", "64 tokens"),
    ],
)
def test_a_request_that_cannot_run_is_told_why_and_spoils_nothing(
    prompt: list[int], max_tokens: int, code: str, says: str
) -> None:
    driver, _ = start(engine={"max_model_len": 64})
    driver.submit("good", [65], 2)
    driver.submit("bad", prompt, max_tokens)
    driver.run()
    finished = driver.finished("bad")
    assert (finished.reason, finished.error_code) == ("error", code)
    assert says in (finished.error or "")
    assert driver.finished("good").reason == "length"
    driver.assert_all_free()


@pytest.mark.parametrize("at_launch", [True, False])
@pytest.mark.parametrize("order", ORDERS)
def test_a_step_that_fails_ends_its_own_requests_and_the_engine_goes_on(order: str, at_launch: bool) -> None:
    settings = settings_of(
        engine={"device": "simulated"},
        simulated=TIMES,
        scheduler={"max_num_seqs": 2},
        token_interval=ORDERS[order],
    )
    error = RuntimeError("/secret/path")
    driver, _ = simulated(
        settings, lambda inner: BreakingDevice(inner, lambda plan, step: error if step == 2 else None, at_launch)
    )
    for name in "abc":
        driver.submit(name, [65], 5)
    driver.run()
    for name in "ab":
        finished = driver.finished(name)
        assert (finished.reason, finished.error_code, finished.output_tokens) == ("error", "engine_error", 1)
        assert "/secret" not in (finished.error or "")
    assert driver.finished("c").reason == "length"
    driver.close()


def test_a_request_submitted_twice_is_served_once() -> None:
    driver, _ = start()
    driver.submit("a", [65], 3)
    driver.submit("a", [65], 3)
    driver.run()
    assert driver.finished("a").output_tokens == 3


def test_shutdown_is_heard() -> None:
    driver, _ = start()
    driver.core.take(Shutdown())
    assert driver.core.is_shut_down


# -- the simulated device's tokens -----------------------------------------------------------------------------------


def test_simulated_tokens_are_letters_and_depend_on_nothing_but_their_own_request() -> None:
    alone, _ = start()
    alone.submit("it", [65, 66], 50, temperature=1.0, seed=9)
    alone.run()
    crowd, _ = start(scheduler={"max_num_batched_tokens": 33})
    for name in "abc":
        crowd.submit(name, [70] * 30, 50)
    crowd.submit("it", [65, 66], 50, temperature=1.0, seed=9)
    crowd.run()
    assert crowd.tokens("it") == alone.tokens("it")
    assert crowd.tokens("a") == crowd.tokens("b")  # greedy, same prompt
    assert crowd.tokens("a") != crowd.tokens("it")
    assert set(alone.tokens("it")) <= set(ALPHABET)
    assert EOS not in alone.tokens("it")


def test_the_simulated_device_stops_at_a_stop_id() -> None:
    driver, _ = start()
    driver.submit("a", [65], 30)
    driver.run()
    stop = driver.tokens("a")[7]
    driver.submit("b", [65], 30, stop_token_ids=(stop, EOS))
    driver.run()
    assert driver.finished("b").reason == "stop"
    assert driver.tokens("b") == driver.tokens("a")[: driver.tokens("a").index(stop) + 1]
