"""How a device runs its model over a step's chunks: which kind of step it makes, and whether it replays one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch

from backend_engine.core.step import Chunk
from backend_engine.devices.decode_graphs import CudaRecorder, DecodeGraphs, size_for
from backend_engine.devices.kv_cache import KvCache
from backend_engine.devices.memory import is_memory_error
from backend_engine.devices.packed_step import Model, PackedStep, last_rows, logits_of
from backend_engine.devices.paged_step import Kernel, PagedStep, flash_attention, sequences_of, why_not_paged
from backend_engine.devices.selfcheck import SelfCheck
from backend_engine.devices.slot_rows import SlotRows
from backend_engine.models.errors import ModelError
from backend_engine.models.loading import LoadedModel

log = logging.getLogger(__name__)

Logits = Callable[[], torch.Tensor]
"""Runs what was prepared; the logits of the rows that sample, [N, vocab]."""


class StepForward(Protocol):
    """A model's forward."""

    def prepare(self, chunks: Sequence[Chunk]) -> Logits:
        """Does the host's part for these chunks, of which there is one at least."""


class PackedForward:
    """Attention over what each sequence's pages hold, one sequence or one group of them at a time: for a CPU, and for
    what flash attention does not do."""

    def __init__(self, model: Model, rows: SlotRows, cache: KvCache) -> None:
        self._model = model
        self._rows = rows
        self._cache = cache

    def prepare(self, chunks: Sequence[Chunk]) -> Logits:
        step = PackedStep(chunks, self._rows.gather(chunks), self._rows.state.block_tables, self._cache)
        return lambda: logits_of(self._model, step)


class PagedForward:
    """Attention over the cache as it lies, and recorded decode steps where there are any."""

    def __init__(
        self,
        model: Model,
        rows: SlotRows,
        cache: KvCache,
        kernel: Kernel,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self._model = model
        self._rows = rows
        self._cache = cache
        self._graphs = graphs
        self._kernel = kernel

    def prepare(self, chunks: Sequence[Chunk]) -> Logits:
        graphs = self._graphs
        is_recorded = graphs is not None and size_for(len(chunks), graphs.sizes) is not None
        if graphs is not None and is_recorded and all(chunk.decodes for chunk in chunks):
            slots = self._rows.slot_ids(chunks)
            return lambda: graphs.logits(slots)
        given, tables = self._rows.gather(chunks), self._rows.state.block_tables
        sequences = sequences_of(chunks, tables, self._cache.page_size)
        step = PagedStep(given, sequences, last_rows(chunks, tables.device), self._cache, self._kernel)
        return lambda: logits_of(self._model, step)


def open_forward(
    loaded: LoadedModel,
    model: Model,
    rows: SlotRows,
    cache: KvCache,
    check: SelfCheck,
    *,
    spare_row: int,
    uses_graphs: bool,
) -> tuple[StepForward, float]:
    """The best forward of `model` that this device has, and how far its logits are from transformers' own (relative).
    Raises ModelError when every way differs too much."""
    device = rows.state.length.device
    is_cuda = device.type == "cuda"
    capability = torch.cuda.get_device_capability(device) if is_cuda else None
    why_not = why_not_paged(loaded.layers, loaded.dtype, cache.page_size, capability)
    if why_not is None:
        try:
            kernel = flash_attention()
            difference = check.compare(model, cache, partial(PagedStep.of, kernel=kernel))
        except (ImportError, TypeError, RuntimeError, ModelError) as error:
            if is_memory_error(error):
                raise
            why_not = str(error).splitlines()[0]
        else:
            graphs = _recorded(loaded, model, rows, cache, kernel, spare_row) if uses_graphs else None
            log.info("attention reads the paged cache in place; decode steps are %s", "replayed" if graphs else "run")
            return PagedForward(model, rows, cache, kernel, graphs), difference
    if is_cuda:
        log.warning("attention gathers the pages of each sequence, which is slow: %s", why_not)
    return PackedForward(model, rows, cache), check.compare(model, cache)


def _recorded(
    loaded: LoadedModel, model: Model, rows: SlotRows, cache: KvCache, kernel: Kernel, spare_row: int
) -> DecodeGraphs | None:
    try:
        with torch.inference_mode():
            return DecodeGraphs(
                model,
                rows,
                cache,
                spare_row=spare_row,
                longest_tokens=loaded.max_model_len,
                record=CudaRecorder(rows.state.length.device),
                kernel=kernel,
            )
    except RuntimeError as error:  # out of memory too: the engine can do without
        log.warning("decode steps run without CUDA graphs: %s", str(error).splitlines()[0])
        return None
