"""The overlapped loop: no gap between steps, one late step at most, and slots and pages that come back after it."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
from engine_support import ORDERS, Driver, settings_of, simulated

from backend_engine.core.forward import ForwardThread, QueuedFlight, start_forward
from backend_engine.core.messages import Submit
from backend_engine.core.step import Device, Flight, StepPlan, StepResult
from backend_engine.devices.simulated import ALPHABET
from tracing.clock import FakeClock

MS = 1_000_000
TIMES = {"forward_ms": 10, "prefill_token_us": 100, "decode_token_us": 1000}
OVERLAPPED = ("overlapped", "pipelined")
HOST_MS = 2.0


class Recording:
    """Passes steps on and keeps their plans."""

    def __init__(self, inner: Device) -> None:
        self.info = inner.info
        self.plans: list[StepPlan] = []
        self._inner = inner

    def launch(self, plan: StepPlan) -> Flight:
        self.plans.append(plan)
        return self._inner.launch(plan)


def start(order: str, **sections: dict[str, Any]) -> tuple[Driver, FakeClock, list[StepPlan]]:
    kept: list[Recording] = []

    def wrap(inner: Device) -> Device:
        kept.append(Recording(inner))
        return kept[0]

    engine = {"device": "simulated"} | sections.pop("engine", {})
    settings = settings_of(engine=engine, simulated=TIMES, token_interval=ORDERS[order], **sections)
    driver, clock = simulated(settings, wrap)
    return driver, clock, kept[0].plans


def settle(driver: Driver) -> None:
    """Lets the forward thread launch all that it was given, before the test moves the clock."""
    for launched in driver.core._flights:
        if isinstance(launched.flight, QueuedFlight):
            assert launched.flight._launched.wait(10)


def stop_of(driver: Driver, name: str, at: int) -> int:
    """The token that is `at` in an answer and not before."""
    tokens = driver.tokens(name)
    assert tokens[at] not in tokens[:at]
    return tokens[at]


@pytest.mark.parametrize("order", ORDERS)
def test_host_work_between_steps_is_a_gap_in_order_and_none_when_overlapped(order: str) -> None:
    driver, clock, _ = start(order)
    queued_ns = clock.mono_ns()
    driver.submit("a", [65] * 50, 6)
    while driver.core.wait_ns() is not None:
        driver.turn()
        settle(driver)
        clock.advance_ms(HOST_MS)  # sending, and whatever else the host does between two turns
    first, last = driver.scheduled("a"), driver.finished("a")
    is_overlapped = order in OVERLAPPED
    gap_ns = 0 if is_overlapped else HOST_MS * MS
    assert [step.gap_ns for step in driver.steps] == [None] + [gap_ns] * 5
    assert [step.forward_ns for step in driver.steps] == [15 * MS] + [11 * MS] * 5
    assert last.gap_ns == 5 * gap_ns
    assert first.scheduled_ns == queued_ns
    assert first.prefill_end_ns - first.scheduled_ns == 15 * MS
    assert last.last_token_ns == first.prefill_end_ns + 5 * (11 * MS + gap_ns)
    driver.close()


def wait_for_company(driver: Driver, clock: FakeClock, arrives_ns: int, name: str) -> None:
    """What the core's process does between two turns: takes who comes before the next step must be planned."""
    settle(driver)
    slack_ns = driver.core.slack_ns()
    if slack_ns and clock.mono_ns() <= arrives_ns <= clock.mono_ns() + slack_ns:
        clock.advance_ms((arrives_ns - clock.mono_ns()) / 1e6)
        driver.submit(name, [66], 2)
        slack_ns = driver.core.slack_ns()
    clock.advance_ms(slack_ns / 1e6)


@pytest.mark.parametrize("order", OVERLAPPED)
def test_who_comes_in_the_first_two_thirds_of_a_step_is_in_the_next_one_and_there_is_no_gap(order: str) -> None:
    driver, clock, plans = start(order)
    driver.submit("a", [65], 20)
    while len(driver.steps) < 8:
        driver.turn()
        settle(driver)
    assert driver.core.slack_ns() == pytest.approx(11 * MS * 2 / 3, abs=2)
    arrives_ns = clock.mono_ns() + 7 * MS
    wait_for_company(driver, clock, arrives_ns, "b")
    planned = len(plans)
    driver.turn()
    settle(driver)
    assert [chunk.request.id for chunk in plans[planned].chunks] == ["a", "b"]
    while driver.core.wait_ns() is not None:
        wait_for_company(driver, clock, -1, "nobody")
        driver.turn()
    assert driver.scheduled("b").scheduled_ns - arrives_ns == pytest.approx(4 * MS, abs=2)  # the rest of that step
    assert {step.gap_ns for step in driver.steps[1:]} == {0}
    driver.close()


@pytest.mark.parametrize("order", ORDERS)
def test_the_plan_waits_for_nobody_where_nobody_could_be_let_in(order: str) -> None:
    driver, _, _ = start(order, scheduler={"max_num_seqs": 2})
    for name in "abc":
        driver.submit(name, [65], 30)
    for _ in range(12):
        driver.turn()
        assert driver.core.slack_ns() == 0
    driver.run()
    driver.close()


@pytest.mark.parametrize("order", OVERLAPPED)
def test_the_wait_of_a_built_step_for_the_one_before_belongs_to_the_queue(order: str) -> None:
    driver, clock, _ = start(order)
    driver.submit("a", [65], 8)
    driver.turn()
    settle(driver)
    clock.advance_ms(3)
    queued_ns = clock.mono_ns()
    driver.submit("b", [66] * 10, 2)
    driver.run()
    b = driver.scheduled("b")
    first_step_ends = driver.scheduled("a").prefill_end_ns
    assert b.scheduled_ns == first_step_ends  # its step was launched 7.1 ms before
    assert b.scheduled_ns - queued_ns == 7.1 * MS
    assert b.prefill_end_ns - b.scheduled_ns == (10 + 1 + 1) * MS  # 10 tokens of b and one of a
    driver.close()


@pytest.mark.parametrize("order", [order for order in ORDERS if order != "in order"])
def test_a_request_that_stops_is_in_one_further_step_whose_token_is_dropped(order: str) -> None:
    whole, _, _ = start("in order")
    whole.submit("a", [65, 66], 20)
    whole.run()
    stop = stop_of(whole, "a", 4)

    driver, _, plans = start(order)
    driver.submit("a", [65, 66], 20, stop_token_ids=(stop,))
    driver.submit("b", [70], 30)
    driver.run()
    assert driver.tokens("a") == whole.tokens("a")[:5]
    assert driver.finished("a").reason == "stop"
    assert driver.finished("a").output_tokens == 5
    assert sum(any(chunk.request.id == "a" for chunk in plan.chunks) for plan in plans) == 6
    driver.close()


@pytest.mark.parametrize("order", ORDERS)
def test_a_request_whose_length_is_known_to_end_is_in_no_further_step(order: str) -> None:
    driver, _, plans = start(order)
    driver.submit("a", [65, 66], 5)
    driver.submit("b", [70], 30)
    driver.run()
    assert sum(any(chunk.request.id == "a" for chunk in plan.chunks) for plan in plans) == 5
    assert len(plans) == 30
    driver.close()


@pytest.mark.parametrize("order", OVERLAPPED)
def test_slot_and_pages_come_back_after_the_step_in_flight_and_not_before(order: str) -> None:
    driver, clock, plans = start(order, scheduler={"max_num_seqs": 1})
    driver.submit("a", [65], 100)
    driver.submit("b", [66], 2)
    driver.turn()
    driver.turn()  # commits the first step; the second and third are under way
    asked_ns = clock.mono_ns()
    driver.abort("a", asked_ns)
    assert driver.core.slots.used == 1
    assert driver.core.pages.used == 1
    assert "a" not in {name for name in driver.outputs if driver.outputs[name][-1].finished}
    driver.run()
    finished = driver.finished("a")
    assert finished.reason == "abort"
    assert finished.wasted_tokens == finished.output_tokens - len(driver.tokens("a")) == 1
    assert finished.ended_ns == finished.last_token_ns
    opened_b = next(at for at, plan in enumerate(plans) if any(chunk.request.id == "b" for chunk in plan.chunks))
    assert [chunk.request.id for chunk in plans[opened_b - 1].chunks] == ["a"]
    assert driver.scheduled("b").scheduled_ns >= finished.ended_ns
    driver.close()


@pytest.mark.parametrize("order", ORDERS)
def test_the_gap_is_unknown_after_idleness_in_every_order(order: str) -> None:
    driver, clock, _ = start(order)
    driver.submit("a", [65], 3)
    driver.run()
    clock.advance_ms(500)
    driver.submit("b", [65], 2)
    driver.run()
    gaps = [step.gap_ns for step in driver.steps]
    assert (gaps[0], gaps[3], len(gaps)) == (None, None, 5)
    driver.close()


@pytest.mark.parametrize("order", ORDERS)
def test_what_runs_is_told_truthfully(order: str) -> None:
    for slot_reuse in (True, False):
        settings = settings_of(
            engine={"device": "simulated"}, token_interval=ORDERS[order] | {"slot_reuse": slot_reuse}
        )
        driver, _ = simulated(settings)
        assert driver.core.info.async_scheduling == ORDERS[order]["async_scheduling"]
        assert driver.core.info.slot_reuse == slot_reuse
        driver.close()


@pytest.mark.parametrize("slot_reuse", [True, False])
def test_slot_reuse_tells_the_device_only_what_changed(slot_reuse: bool) -> None:
    driver, _, plans = start("in order", engine={"page_size": 4})
    driver.core._scheduler._reuses_slots = slot_reuse
    driver.submit("a", [65] * 6, 9)
    driver.submit("b", [66] * 3, 9)
    driver.run()
    opened = [len(plan.opened) for plan in plans]
    assert opened == ([2] + [0] * 8 if slot_reuse else [2] * 9)
    # of each sequence's 14 and 11 computed tokens: 2 and 1 pages at the start, the others as they are needed
    assert sum(len(plan.pages) for plan in plans) == (2 + 2 if slot_reuse else 0)
    driver.close()


class SlowLaunch:
    """A device whose launch blocks until the test lets it go, as a forward on a CPU does."""

    def __init__(self, inner: Device) -> None:
        self.info = inner.info
        self.inner = inner
        self.go = threading.Semaphore(0)
        self.launched = threading.Semaphore(0)
        self.launched_by = 0

    def launch(self, plan: StepPlan) -> Flight:
        self.launched_by = threading.get_ident()
        self.launched.release()
        assert self.go.acquire(timeout=10)
        return self.inner.launch(plan)


def test_the_forward_threads_queue_holds_one_step_and_start_blocks_for_a_second() -> None:
    driver, _, plans = start("in order")
    driver.submit("a", [65], 3)
    driver.run()
    device = SlowLaunch(driver.core._device)
    forward = ForwardThread(lambda: device)
    first, second = forward.start(plans[0]), forward.start(plans[1])
    assert device.launched.acquire(timeout=10)  # the first is being launched, the second lies in the queue
    is_third_in = threading.Event()
    flights: list[Flight] = []

    def put_third() -> None:
        flights.append(forward.start(plans[2]))
        is_third_in.set()

    putter = threading.Thread(target=put_third)
    putter.start()
    assert not is_third_in.wait(0.05)
    device.go.release(3)
    putter.join(10)
    assert is_third_in.is_set()
    results: list[StepResult] = [flight.wait() for flight in (first, second, *flights)]
    assert [result.end_ns for result in results] == sorted({result.end_ns for result in results})
    forward.close()


@pytest.mark.parametrize("order", ["in order", "pipelined"])
def test_five_thousand_requests_of_which_a_third_are_aborted_leave_nothing_behind(order: str) -> None:
    driver, _, _ = start(
        order,
        engine={"page_size": 8, "max_model_len": 64, "cpu_kv_cache_gib": 96 * 8 * 2048 / 2**30},
        scheduler={"max_num_seqs": 32, "max_num_batched_tokens": 256, "queue_warn_ms": 1e9},
    )
    driver.core._device.plans = ForgetfulList()  # type: ignore[attr-defined]
    chance = random.Random(11)
    beginnings = [[chance.choice(ALPHABET) for _ in range(24)] for _ in range(4)]
    submitted = aborted = 0
    alive: list[str] = []
    while submitted < 5000 or driver.core.wait_ns() is not None:
        for _ in range(min(5000 - submitted, chance.randint(0, 24))):
            name = f"r{submitted}"
            prompt = [*chance.choice(beginnings)[: chance.randint(1, 24)], chance.choice(ALPHABET)]
            stops = tuple(chance.sample(list(ALPHABET), 3))
            driver.submit(name, prompt, chance.randint(1, 30), stop_token_ids=stops)
            submitted += 1
            alive.append(name)
        while aborted < 0.3 * submitted and alive:
            driver.abort(alive.pop(chance.randrange(len(alive))))
            aborted += 1
        said = driver.turn()
        ended = {output.request_id for output in said.outputs if output.finished} if said is not None else set()
        alive = [name for name in alive if name not in ended]
        driver.said.clear() if submitted < 5000 else None
    reasons = [driver.finished(f"r{number}").reason for number in range(5000)]
    assert set(reasons) == {"stop", "length", "abort"}
    assert aborted == 1500
    assert reasons.count("abort") > 1400  # few had ended in the step that was under way when they were asked to
    last = driver.said[-1].gauges
    assert (last.running, last.waiting, last.kv_used) == (0, 0, 0)
    assert last.prefix_hits_total > 0
    assert last.evictions_total > 0
    driver.close()


class ForgetfulList(list[StepPlan]):
    """Keeps no plan: there are thousands of them."""

    def append(self, plan: StepPlan) -> None:
        """Forgets it."""


def test_a_second_submit_of_an_id_in_flight_is_ignored_in_the_pipeline_too() -> None:
    driver, clock, _ = start("pipelined")
    driver.submit("a", [65], 5)
    driver.turn()
    driver.core.take(
        Submit("a", [66], driver.core._scheduler.find("a").sampling, clock.mono_ns())  # type: ignore[union-attr]
    )
    driver.run()
    assert driver.finished("a").output_tokens == 5
    driver.close()


def test_the_thread_that_launches_is_the_one_that_opened_the_device() -> None:
    driver, _, plans = start("in order")
    driver.submit("a", [65], 1)
    driver.run()
    device = SlowLaunch(driver.core._device)
    device.go.release()
    threads: list[int] = []

    def opens() -> Device:
        threads.append(threading.get_ident())
        return device

    forward = start_forward(opens, has_thread=True)
    forward.start(plans[0]).wait()
    assert threads == [device.launched_by]
    assert threads != [threading.get_ident()]
    forward.close()


def test_what_opening_raises_is_raised_and_its_thread_ends() -> None:
    def opens() -> Device:
        raise ValueError("no such model")

    before = threading.active_count()
    with pytest.raises(ValueError, match="no such model"):
        start_forward(opens, has_thread=True)
    assert threading.active_count() == before
