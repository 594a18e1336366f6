"""However the loop is ordered, every answer is the same: 200 random scenarios with each of two small models."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))  # the engine's own test rigs

from engine_scenarios import LLAMA, WINDOWED, compare_orders, open_tiny_device

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
