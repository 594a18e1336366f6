"""Ten thousand requests leave the engine as large as it was: pools are allocated once, and nothing is remembered."""

from __future__ import annotations

import gc
import random
import tracemalloc
from itertools import pairwise

import msgspec
import torch
from engine_support import ORDERS, Driver, settings_of

from backend_engine.devices.simulated import ALPHABET, VOCAB_SIZE, SimulatedDevice
from backend_engine.devices.slot_rows import SlotRows
from tracing.clock import FakeClock


def test_nothing_grows_over_ten_thousand_requests() -> None:
    settings = settings_of(
        engine={"device": "simulated", "page_size": 4, "max_model_len": 32, "cpu_kv_cache_gib": 256 * 2048 / 2**30},
        scheduler={"max_num_seqs": 16, "queue_warn_ms": 1e9},
        token_interval=ORDERS["pipelined"],
    )
    clock = FakeClock()

    def sleep_until(instant_ns: int) -> None:
        clock.advance_ms(max(0, instant_ns - clock.mono_ns()) / 1e6)

    rows = SlotRows(16, 32, 4, VOCAB_SIZE, torch.device("cpu"))
    tensors = [*msgspec.structs.asdict(rows.state).values(), *vars(rows).values()]
    places = [tensor.data_ptr() for tensor in tensors if isinstance(tensor, torch.Tensor)]
    driver = Driver(SimulatedDevice(settings, clock, sleep_until, rows), settings, clock)
    chance = random.Random(2)

    def serve(first: int, last: int) -> int:
        for number in range(first, last):
            prompt = [chance.choice(ALPHABET) for _ in range(chance.randint(1, 12))]
            how = {"presence_penalty": 1.0} if number % 5 == 0 else {}
            driver.submit(f"r{number}", prompt, chance.randint(1, 4), **how)
            if number % 16 == 15:
                driver.run()
                driver.said.clear()
                driver.outputs.clear()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        held = [serve(first, first + 2500) for first in range(0, 10_000, 2500)]
    finally:
        tracemalloc.stop()
    # What leaks does so all the time; once, something else in this process may have.
    assert min(late - early for early, late in pairwise(held)) < 7000, held
    assert [tensor.data_ptr() for tensor in tensors if isinstance(tensor, torch.Tensor)] == places
    driver.run()
    driver.close()
