"""A device that runs out of memory: the step is tried again smaller, or the newest request goes; the engine goes on."""

from __future__ import annotations

import pytest
from engine_support import ORDERS, BreakingDevice, Driver, settings_of, simulated

from backend_engine.core.step import OutOfDeviceMemory, StepPlan

SIZES = {"a": (40, 12), "b": (25, 12), "c": (3, 12), "d": (60, 12)}


def start(order: str, breaks: object, at_launch: bool = True) -> Driver:
    settings = settings_of(
        engine={"device": "simulated", "page_size": 4},
        scheduler={"max_num_seqs": 4, "max_num_batched_tokens": 64},
        token_interval=ORDERS[order],
    )
    driver, _ = simulated(settings, lambda inner: BreakingDevice(inner, breaks, at_launch))  # type: ignore[arg-type]
    return driver


def submit_all(driver: Driver) -> None:
    for number, (name, (prompt, answer)) in enumerate(SIZES.items()):
        driver.submit(name, [65 + number] * prompt, answer)


def expected() -> dict[str, list[int]]:
    driver = start("in order", lambda plan, step: None)
    submit_all(driver)
    driver.run()
    return {name: driver.tokens(name) for name in SIZES}


@pytest.mark.parametrize("at_launch", [True, False])
@pytest.mark.parametrize("order", ORDERS)
def test_a_step_too_large_is_tried_again_smaller_and_every_answer_is_what_it_would_have_been(
    order: str, at_launch: bool
) -> None:
    def breaks(plan: StepPlan, step: int) -> Exception | None:
        return OutOfDeviceMemory("too large") if plan.tokens > 20 else None

    driver = start(order, breaks, at_launch)
    submit_all(driver)
    driver.run()
    assert {name: driver.tokens(name) for name in SIZES} == expected()
    assert all(step.tokens <= 20 for step in driver.steps)
    assert driver.said[-1].gauges.ooms_total >= 2
    driver.close()


@pytest.mark.parametrize("order", ORDERS)
def test_steps_grow_again_once_memory_is_there(order: str) -> None:
    driver = start(order, lambda plan, step: OutOfDeviceMemory("now") if step == 1 else None)
    driver.submit("a", [65] * 500, 40)
    driver.run()
    sizes = [step.tokens for step in driver.steps]
    assert max(sizes[1:6]) == 32  # one of full size was in flight already
    assert 64 in sizes
    driver.close()


@pytest.mark.parametrize("order", ORDERS)
def test_when_a_step_cannot_be_smaller_the_newest_request_goes_and_the_engine_goes_on(order: str) -> None:
    """Only steps with `bad` in them fail, however small."""

    def breaks(plan: StepPlan, step: int) -> Exception | None:
        is_bad = any(chunk.request.id == "bad" for chunk in plan.chunks)
        return OutOfDeviceMemory(f"{plan.tokens} tokens; lower x") if is_bad else None

    driver = start(order, breaks)
    submit_all(driver)
    for _ in range(3):
        driver.turn()
    driver.abort("d")
    driver.submit("bad", [90] * 30, 5)
    driver.run()
    finished = driver.finished("bad")
    assert (finished.reason, finished.error_code) == ("error", "engine_out_of_memory")
    assert finished.error == "1 tokens; lower x"
    for name in "abc":
        assert driver.tokens(name) == expected()[name]
    driver.submit("after", [91] * 30, 5)
    driver.run()
    assert driver.finished("after").reason == "length"
    driver.close()
