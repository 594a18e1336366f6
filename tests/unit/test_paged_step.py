"""What a GPU would be handed, on a CPU: steps over the paged cache as it lies, and decode steps that are replayed."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_scenarios import compare_orders, open_tiny_device
from engine_support import settings_of, write_tiny_model
from paged_reference import Rerun, on_paged_steps, paged_attention

from backend_engine.devices import forwards
from backend_engine.devices.decode_graphs import MOST_ROWS, DecodeGraphs, batch_sizes, size_for
from backend_engine.devices.forwards import PackedForward, PagedForward
from backend_engine.devices.kv_cache import KvCache
from backend_engine.devices.opening import open_device
from backend_engine.devices.packed_step import PackedStep, logits_of
from backend_engine.devices.paged_step import PagedStep, why_not_paged
from backend_engine.devices.torch_device import TorchDevice
from backend_engine.models.loading import load_model
from backend_engine.models.probe import LayerShape
from tracing.clock import SystemClock

KINDS = ("llama with grouped queries", "qwen3 with windows in some layers")
AMPERE = (8, 0)


class Part:
    """One sequence's part in a step."""

    def __init__(self, slot: int, start: int, count: int, samples: bool = True) -> None:
        self.slot, self.start, self.count, self.samples = slot, start, count, samples


@pytest.mark.parametrize("kind", KINDS)
def test_it_gives_the_logits_of_the_step_that_gathers(kind: str, tmp_path: Path) -> None:
    """Prompts whole, in pieces and beside rows that decode, in pages that lie anywhere."""
    write_tiny_model(tmp_path, kind)
    loaded = load_model(settings_of(engine={"model": str(tmp_path)}), torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, loaded.vocab_size, (4, 40), generator=generator)
    tables = torch.randperm(40, generator=generator).view(4, 10)
    steps = [
        [Part(0, 0, 21), Part(2, 0, 1), Part(3, 0, 9, samples=False)],
        [Part(0, 21, 1), Part(3, 9, 11), Part(1, 0, 16), Part(2, 1, 1)],
        [Part(3, 20, 1), Part(1, 16, 1), Part(0, 22, 1), Part(2, 2, 1)],
    ]
    packed, paged = (KvCache(loaded.layers, 40, 4, 40, loaded.dtype, torch.device("cpu")) for _ in range(2))
    with torch.inference_mode():
        for step in steps:
            expected = logits_of(loaded.model, PackedStep.of(step, tokens, tables, packed))
            found = logits_of(loaded.model, PagedStep.of(step, tokens, tables, paged, paged_attention))
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_every_answer_is_the_same_in_any_order_of_the_loop(tmp_path: Path) -> None:
    """More of them, with windows and without recordings: tests/e2e/test_engine_orders_long.py."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        oracle = open_tiny_device(tmp_path)
        tested = on_paged_steps(open_tiny_device(tmp_path), records=True)
        replays = Rerun.replays
        compare_orders(tested, range(8), oracle)
    finally:
        torch.set_num_threads(threads)
    assert Rerun.replays - replays > 50


def no_kernel() -> None:
    raise RuntimeError("no kernel image is available for execution on the device")


def nonsense(query: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return torch.randn_like(query)


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [(lambda: paged_attention, PagedForward), (no_kernel, PackedForward), (lambda: nonsense, PackedForward)],
)
def test_before_it_serves_a_kernel_that_fails_or_differs_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel: Any, kind: type
) -> None:
    monkeypatch.setattr(forwards, "why_not_paged", lambda *_: None)
    monkeypatch.setattr(forwards, "flash_attention", kernel)
    write_tiny_model(tmp_path, KINDS[0])
    settings = settings_of(engine={"model": str(tmp_path), "device": "cpu", "page_size": 4})
    device = open_device(settings, SystemClock())
    assert isinstance(device, TorchDevice)
    assert isinstance(device._forward, kind)


def test_a_recording_that_gives_other_logits_is_not_used(tmp_path: Path) -> None:
    device = open_tiny_device(tmp_path)
    assert isinstance(device, TorchDevice)

    class Nonsense(Rerun):
        def replay(self) -> None:
            self.output.normal_()

    with pytest.raises(RuntimeError, match=r"a recorded decode step of 5 rows differs by"), torch.inference_mode():
        DecodeGraphs(
            device._forward._model, device._rows, device._cache,
            spare_row=5, longest_tokens=48, record=Nonsense, kernel=paged_attention,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("most", "sizes"),
    [(1, [1]), (2, [1, 2]), (5, [1, 2, 4, 5]), (32, [1, 2, 4, 8, 16, 24, 32]), (40, [1, 2, 4, 8, 16, 24, 32, 40])],
)
def test_batches_are_filled_up_to_few_sizes(most: int, sizes: list[int]) -> None:
    assert batch_sizes(most) == sizes
    assert [size_for(rows, sizes) for rows in (1, most)] == [1, most]
    assert size_for(most + 1, sizes) is None
    assert batch_sizes(4000) == batch_sizes(MOST_ROWS)
    largest = batch_sizes(MOST_ROWS)
    assert len(largest) == 13
    assert all((size_for(rows, largest) or 0) < 2 * rows or rows == 1 for rows in range(1, MOST_ROWS + 1))


PLAIN = LayerShape(kv_heads=2, key_dim=64, value_dim=64, window=None)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, None),
        ({"layers": [PLAIN, LayerShape(2, 64, 64, 4096)]}, None),
        ({"dtype": torch.float16, "page_size": 512}, None),
        ({"capability": None}, "no GPU"),
        ({"capability": (7, 5)}, "compute capability 8.0"),
        ({"dtype": torch.float32}, "bfloat16 or float16, not float32"),
        ({"page_size": 16}, "engine.page_size = 256, not 16"),
        ({"layers": [PLAIN, LayerShape(2, 64, 64, None, 30.0)]}, "soft-capping"),
        ({"layers": [LayerShape(2, 192, 128, None)]}, "not 192 and 128"),
        ({"layers": [LayerShape(2, 288, 288, None)]}, "not 288"),
        ({"layers": [LayerShape(2, 60, 60, None)]}, "in eights, not 60"),
    ],
)
def test_what_the_kernel_cannot_do_is_known_before_it_is_asked(changes: dict[str, Any], says: str | None) -> None:
    asked = {"layers": [PLAIN], "dtype": torch.bfloat16, "page_size": 256, "capability": AMPERE} | changes
    why_not = why_not_paged(**asked)
    assert (why_not is None) == (says is None)
    assert says is None or says in str(why_not)


def test_the_kernel_is_called_as_torch_has_it() -> None:
    """The names and the order of its parameters are those of the installed torch."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    theirs = inspect.signature(varlen.varlen_attn).parameters
    ours = inspect.signature(paged_attention).parameters
    assert [name for name in theirs if name in ours] == list(ours)
    assert {name: theirs[name].kind for name in ours} == {name: found.kind for name, found in ours.items()}
