"""Memory of a device: how it is asked for, and how its lack is told apart from other errors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from backend_engine.core.step import OutOfDeviceMemory, StepPlan


def lazy_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros. On a CPU the kernel hands out the memory page by page when it is first written, as calloc does: what is
    large costs only what is used of it."""
    if device.type != "cpu":
        return torch.zeros(*shape, dtype=dtype, device=device)
    count = int(np.prod(shape))
    return torch.from_numpy(np.zeros(count * dtype.itemsize, np.uint8)).view(dtype).view(*shape)


def to_device(values: Sequence[object] | np.ndarray, dtype: type, device: torch.device) -> torch.Tensor:
    """Numbers from the host, without waiting for the device: a copy from pinned memory goes in the stream's order, and
    torch keeps that memory until the copy is done."""
    found = torch.from_numpy(np.ascontiguousarray(np.asarray(values, dtype)))
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found


def available_bytes() -> int | None:
    """Memory that Linux can still hand out; None where that isn't told."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def is_memory_error(error: Exception) -> bool:
    """Whether an allocator had nothing more to give."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)


@contextmanager
def memory_errors_named(plan: StepPlan) -> Iterator[None]:
    """Turns an allocator's error into OutOfDeviceMemory with the step's size and the settings that lower it."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_memory_error(error):
            raise
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        raise OutOfDeviceMemory(
            f"The device ran out of memory in a step of {len(plan.chunks)} sequences and {plan.tokens} tokens; lower "
            "scheduler.max_num_batched_tokens or scheduler.max_num_seqs, or leave the KV cache less "
            "(engine.cpu_kv_cache_gib, engine.gpu_memory_utilization or model.kv_cache_ratio)."
        ) from error
