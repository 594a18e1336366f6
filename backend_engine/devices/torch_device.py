"""A model on a torch device. Written and tested on a CPU; CUDA runs through the same code, unverified so far."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from backend_engine.core.messages import Ready
from backend_engine.core.sampler import sample
from backend_engine.core.step import OutOfDeviceMemory, StepPlan, StepResult
from backend_engine.devices.kv_cache import KvCache
from backend_engine.devices.packed_step import PackedStep, logits_of
from backend_engine.devices.selfcheck import check_agreement
from backend_engine.devices.sizing import GIB, kv_bytes, kv_pages
from backend_engine.devices.slot_rows import SlotRows
from backend_engine.models.loading import LoadedModel, load_model
from settings.schema import Settings
from tracing.clock import Clock

log = logging.getLogger(__name__)


def open_torch_device(settings: Settings, clock: Clock) -> TorchDevice:
    """Loads the model that the settings name. Errors (ValueError) name the cause and the fix."""
    asked = settings.engine.device
    if asked == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            'engine.device = "cuda": torch finds no CUDA device here; set it to "cpu" or "auto", or install the driver '
            "and a CUDA build of torch"
        )
    kind = "cuda" if torch.cuda.is_available() and asked in ("auto", "cuda") else "cpu"
    device = torch.device(kind)
    return TorchDevice(load_model(settings.engine, device), settings, clock, device)


class TorchFlight:
    """A step whose sampled ids are on the device, or on their way there."""

    def __init__(
        self, device: TorchDevice, plan: StepPlan, tokens: torch.Tensor, start_ns: int, kernel_ns: int
    ) -> None:
        self._device = device
        self._plan = plan
        self._tokens = tokens
        self._start_ns = start_ns
        self._kernel_ns = kernel_ns

    def wait(self) -> StepResult:
        """Reads the sampled ids, which waits for them."""
        with _memory_errors_named(self._plan):
            tokens: list[int] = self._tokens.tolist()
        return self._device.finish(self._plan, tokens, self._start_ns, self._kernel_ns)


class TorchDevice:
    """Owns the weights, the KV cache and the slots' rows."""

    def __init__(self, loaded: LoadedModel, settings: Settings, clock: Clock, device: torch.device) -> None:
        self._model = loaded.model
        self._clock = clock
        self._device = device
        self._end_ns = 0
        page_size = settings.engine.page_size
        cache_bytes = _cache_bytes(settings, loaded, device)
        pages = kv_pages(settings, cache_bytes, loaded.kv_bytes_per_token, loaded.max_model_len)
        _check_memory(pages * page_size * loaded.kv_bytes_per_token, device)
        self._cache = KvCache(loaded.layers, pages, page_size, loaded.max_model_len, loaded.dtype, device)
        self._rows = SlotRows(settings.scheduler.max_num_seqs, loaded.max_model_len, page_size, device)
        difference = check_agreement(loaded, self._cache, device)
        log.info(
            "%s on %s in %s: %.2f GiB of weights, %d KV pages of %d tokens (%.2f GiB), up to %d tokens a sequence; "
            "differs from transformers' own forward by %.1e",
            loaded.name,
            device.type,
            str(loaded.dtype).removeprefix("torch."),
            loaded.weight_bytes / GIB,
            pages,
            page_size,
            pages * page_size * loaded.kv_bytes_per_token / GIB,
            loaded.max_model_len,
            difference,
        )
        self.info = Ready(
            device=device.type,
            dtype=str(loaded.dtype).removeprefix("torch."),
            max_model_len=loaded.max_model_len,
            vocab_size=loaded.vocab_size,
            weight_bytes=loaded.weight_bytes,
            kv_pages=pages,
            page_size=page_size,
            eos_token_ids=loaded.eos_token_ids,
        )

    def launch(self, plan: StepPlan) -> TorchFlight:
        """Runs forward, sampling and append. On a CPU that is all done when this returns; on CUDA it is queued."""
        start_ns = max(self._clock.mono_ns(), self._end_ns)
        with _memory_errors_named(plan), torch.inference_mode():
            for slot in plan.opened:
                self._rows.open(slot)
            step = PackedStep(plan.chunks, self._rows.tokens, self._rows.block_tables, self._cache)
            logits = logits_of(self._model, step)
            self._settle()
            kernel_start_ns = self._clock.mono_ns()
            sampled = [chunk for chunk in plan.chunks if chunk.samples]
            tokens = sample(logits, self._rows.sampling(sampled, step.sampled_slots, step.sampled_positions))
            self._rows.append(step.sampled_slots, step.sampled_positions, tokens)
            self._settle()
            return TorchFlight(self, plan, tokens, start_ns, self._clock.mono_ns() - kernel_start_ns)

    def finish(self, plan: StepPlan, tokens: list[int], start_ns: int, kernel_ns: int) -> StepResult:
        """Stamps a step's end."""
        self._end_ns = self._clock.mono_ns()
        return StepResult(tokens, start_ns, self._end_ns, kernel_ns)

    def _settle(self) -> None:
        """The synchronous loop times sampling apart, so the host waits here for queued work; a CPU has none."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _cache_bytes(settings: Settings, loaded: LoadedModel, device: torch.device) -> int:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return min(free, kv_bytes(settings, total, loaded.weight_bytes))
    return kv_bytes(settings, int(settings.engine.cpu_kv_cache_gib * GIB), weight_bytes=0)


def _check_memory(needed_bytes: int, device: torch.device) -> None:
    """A cache larger than what is left would be found out in the middle of a request."""
    available = _available_bytes() if device.type == "cpu" else None
    if available is not None and needed_bytes > available:
        raise ValueError(
            f"the KV cache would take {needed_bytes / GIB:.2f} GiB, and this machine has {available / GIB:.2f} GiB of "
            "memory left beside the weights: lower engine.cpu_kv_cache_gib"
        )


def _available_bytes() -> int | None:
    """Memory that Linux can still hand out; None where that isn't told."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


@contextmanager
def _memory_errors_named(plan: StepPlan) -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        is_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)
        if not is_memory:
            raise
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        raise OutOfDeviceMemory(
            f"The device ran out of memory in a step of {len(plan.chunks)} sequences and {plan.tokens} tokens; lower "
            "scheduler.max_num_batched_tokens or scheduler.max_num_seqs, or leave the KV cache less "
            "(engine.cpu_kv_cache_gib, engine.gpu_memory_utilization or model.kv_cache_ratio)."
        ) from error
