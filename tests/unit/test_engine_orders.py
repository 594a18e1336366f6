"""However the loop is ordered, every answer is the same: random arrivals, lengths, stops, beginnings, aborts.

With a model for 200 seeds: tests/e2e/test_engine_orders_long.py."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engine_scenarios import (
    MAX_MODEL_LEN,
    PAGE_SIZE,
    CheckedDevice,
    Happened,
    RowKeeper,
    alone,
    asks_of,
    check,
    compare_orders,
    open_tiny_device,
    play,
    settings_with,
    short_of_memory,
)
from engine_support import IN_ORDER, ORDERS, Driver

from backend_engine.core.step import Device
from backend_engine.devices.simulated import ALPHABET, VOCAB_SIZE, SimulatedDevice
from backend_engine.devices.slot_rows import SlotRows
from tracing.clock import FakeClock

SEEDS = range(200)


def simulated_driver(settings: Any, clock: FakeClock, seed: int) -> tuple[Driver, RowKeeper]:
    def sleep_until(instant_ns: int) -> None:
        clock.advance_ms(max(0, instant_ns - clock.mono_ns()) / 1e6)

    rows = SlotRows(settings.scheduler.max_num_seqs, MAX_MODEL_LEN, PAGE_SIZE, VOCAB_SIZE, torch.device("cpu"))
    keeper = RowKeeper(CheckedDevice(SimulatedDevice(settings, clock, sleep_until, rows)))
    return Driver(short_of_memory(keeper, seed), settings, clock), keeper


def test_answers_do_not_depend_on_the_order_of_the_loop_on_the_simulated_device() -> None:
    happened = Happened()
    for seed in SEEDS:
        chance = random.Random(seed)
        settings = settings_with(chance, list(ORDERS.values())[seed % 4])
        asks = asks_of(chance, list(ALPHABET))
        clock = FakeClock()
        oracle_settings = settings_with(random.Random(seed), IN_ORDER)
        oracle = SimulatedDevice(oracle_settings, clock, lambda _: None)
        expected = {ask.name: alone(oracle, clock, ask) for ask in asks}
        driver, keeper = simulated_driver(settings, clock, seed)
        play(driver, asks)
        happened.add(driver, check(driver, asks, expected))
        assert keeper.strangers == []
    # what this is about did happen
    assert happened.preemptions > 50
    assert happened.hits > 1000
    assert happened.ooms > 100
    assert happened.aborts > 200


@pytest.fixture(scope="module")
def tiny_device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Device]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield open_tiny_device(tmp_path_factory.mktemp("tiny"))
    torch.set_num_threads(threads)


def test_answers_do_not_depend_on_the_order_of_the_loop_with_a_model(tiny_device: Device) -> None:
    """The oracle is the loop in order, with nobody aborted."""
    happened = compare_orders(tiny_device, SEEDS[:24])
    assert happened.preemptions > 1
    assert happened.hits > 30
    assert happened.ooms > 10
    assert happened.aborts > 15
