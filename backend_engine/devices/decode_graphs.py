"""Decode steps as CUDA graphs: the forward of one token for each of B sequences, recorded once and replayed.

All that such a step reads lies in fixed places on the device: which slots decode is a small tensor here, everything
else (tokens, positions, pages) is in the slots' rows. So a replay needs no more of the host than one call, where the
model's own code costs a launch for each operation of each layer. There is a graph for each of a few batch sizes; a
smaller batch is filled up with the spare row, which nobody owns and which is always done. Sampling stays outside.
Unverified so far: no GPU was at hand.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from backend_engine.devices.kv_cache import KvCache
from backend_engine.devices.packed_step import Model, logits_of
from backend_engine.devices.paged_step import Kernel, PagedStep, sequences_that_decode
from backend_engine.devices.slot_rows import SlotRows

log = logging.getLogger(__name__)

MOST_ROWS = 256
"""A larger batch keeps the GPU busy for longer than its launches take."""
TOLERANCE = 0.05
"""Most |replayed - run| / |run| of logits: both run the same kernels, so this is for a graph that recorded nonsense."""


def batch_sizes(most: int) -> list[int]:
    """Powers of two, from 16 on the middle between two as well, and `most` itself: at most half of a batch is filled
    up, from 16 on a third. In ascending order, none above MOST_ROWS."""
    most = min(most, MOST_ROWS)
    sizes = {most}
    size = 1
    while size < most:
        sizes.add(size)
        if size >= 16 and size + size // 2 < most:
            sizes.add(size + size // 2)
        size *= 2
    return sorted(sizes)


def size_for(rows: int, sizes: Sequence[int]) -> int | None:
    """The smallest batch that holds `rows`; None when there is none."""
    return next((size for size in sizes if size >= rows), None)


class Recording(Protocol):
    """What was recorded: its output is in the same place after every replay."""

    output: torch.Tensor

    def replay(self) -> None:
        """Queues all of it on the current stream."""


Record = Callable[[Callable[[], torch.Tensor]], Recording]


class CudaRecorder:
    """Records what a function queues on the device. All recordings share one pool of memory: their results are read
    before the next is replayed, since all of them run in one stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, make: Callable[[], torch.Tensor]) -> Recording:
        stream = self._stream  # the same for all, as a shared pool wants it
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            make()  # what libraries set up at their first call can't be recorded
            make()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            output = make()
        return _CudaRecording(graph, output)


class _CudaRecording:
    def __init__(self, graph: torch.cuda.CUDAGraph, output: torch.Tensor) -> None:
        self._graph = graph
        self.output = output

    def replay(self) -> None:
        self._graph.replay()


class DecodeGraphs:
    """Recordings for batches of up to `most_rows` sequences. Used by the one thread that launches."""

    def __init__(
        self,
        model: Model,
        rows: SlotRows,
        cache: KvCache,
        *,
        spare_row: int,
        longest_tokens: int,
        record: Record,
        kernel: Kernel,
    ) -> None:
        """`spare_row` of `rows` is never opened. Raises RuntimeError when a forward can't be recorded, or when what was
        recorded gives other logits than the forward itself."""
        self._model = model
        self._rows = rows
        self._cache = cache
        self._spare_row = spare_row
        self._longest_tokens = longest_tokens
        self._kernel = kernel
        self._slots: dict[int, torch.Tensor] = {}
        self._recordings: dict[int, Recording] = {}
        self.sizes = batch_sizes(spare_row)
        for size in reversed(self.sizes):  # the largest first: the others find their memory in its
            self._record(size, record)

    def logits(self, slots: torch.Tensor) -> torch.Tensor:
        """Logits of the next token of `slots` [N] int64, [N, vocab]: valid until the next call. The caller has made
        sure that a size holds them."""
        size = size_for(len(slots), self.sizes)
        assert size is not None, len(slots)
        fixed = self._slots[size]
        fixed.fill_(self._spare_row)
        fixed[: len(slots)].copy_(slots)
        recording = self._recordings[size]
        recording.replay()
        return recording.output[: len(slots)]

    def _record(self, size: int, record: Record) -> None:
        fixed = torch.full((size,), self._spare_row, dtype=torch.int64, device=self._rows.state.length.device)

        def forward() -> torch.Tensor:
            given = self._rows.gather_newest(fixed)
            tables = self._rows.state.block_tables
            sequences = sequences_that_decode(fixed, given.positions, tables, self._longest_tokens)
            every_row = torch.arange(size, device=fixed.device)
            return logits_of(self._model, PagedStep(given, sequences, every_row, self._cache, self._kernel))

        expected = forward().clone()
        recording = record(forward)
        recording.output.zero_()
        recording.replay()
        difference = float((recording.output - expected).float().norm() / expected.float().norm())
        if not difference <= TOLERANCE:
            raise RuntimeError(f"a recorded decode step of {size} rows differs by {difference:.2g} from the one run")
        self._slots[size], self._recordings[size] = fixed, recording
