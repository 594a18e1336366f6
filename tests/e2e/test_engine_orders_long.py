"""However the loop is ordered, every answer is the same: 200 random scenarios with each of two small models."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))  # the engine's own test rigs

from engine_scenarios import LLAMA, WINDOWED, compare_orders, open_tiny_device
from paged_reference import Rerun, on_paged_steps

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("kind", [LLAMA, WINDOWED])
def test_answers_do_not_depend_on_the_order_of_the_loop_in_200_scenarios(kind: str, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        happened = compare_orders(open_tiny_device(tmp_path, kind), range(200))
    finally:
        torch.set_num_threads(threads)
    assert happened.preemptions > 20
    assert happened.hits > 400
    assert happened.ooms > 100
    assert happened.aborts > 200


@pytest.mark.parametrize(("kind", "records"), [(LLAMA, False), (LLAMA, True), (WINDOWED, True)])
def test_so_they_are_on_the_steps_that_a_gpu_is_handed(kind: str, records: bool, tmp_path: Path) -> None:
    """With the kernel written out in torch, and recordings that run again what they recorded."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        oracle = open_tiny_device(tmp_path, kind)
        replays = Rerun.replays
        happened = compare_orders(on_paged_steps(open_tiny_device(tmp_path, kind), records=records), range(60), oracle)
    finally:
        torch.set_num_threads(threads)
    assert happened.hits > 60
    assert happened.ooms > 20
    assert (Rerun.replays - replays > 1000) == records
