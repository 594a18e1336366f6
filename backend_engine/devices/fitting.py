"""Whether a model and its KV cache fit into memory, found out before anything runs: with the numbers, and the settings
that make it fit.

Sizes are checked twice: the weights by their files' headers before they are loaded, since a machine that runs out while
it loads ends the process without a word; the cache when the weights are there and what is left is known.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch

from backend_engine.devices.memory import available_bytes, is_memory_error
from backend_engine.devices.sizing import GIB, kv_bytes, kv_pages
from settings.schema import Settings

_CGROUP = Path("/sys/fs/cgroup")


class FitError(ValueError):
    """It does not fit. The message says what takes how much, and what to change."""


class Memory(msgspec.Struct, frozen=True):
    """Of one device, in bytes."""

    kind: str
    """cpu or cuda."""
    total: int | None
    free: int | None
    """None: the system does not tell."""


def memory_of(device: torch.device) -> Memory:
    """As it is now."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return Memory("cuda", total, free)
    known = [size for size in (available_bytes(), cgroup_left(_CGROUP)) if size is not None]
    return Memory("cpu", None, min(known, default=None))


def cgroup_left(folder: Path) -> int | None:
    """What a container's limit still allows (cgroup v2), file caches that can be dropped included; None: no limit."""
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else int(limit) - used + int(stat.get("inactive_file", 0))


def check_weights(settings: Settings, weight_bytes: int, dtype: torch.dtype, memory: Memory) -> None:
    """Before they are loaded. Raises FitError."""
    engine = settings.engine
    takes = f"the weights of model {engine.model!r} take {_gib(weight_bytes)} in {_name(dtype)}"
    if memory.kind == "cpu":
        if memory.free is not None and weight_bytes > memory.free:
            raise FitError(
                f"{takes}, and this machine has {_gib(memory.free)} of memory left: take a smaller model"
                f"{_narrower(dtype)}"
            )
        return
    assert memory.total is not None
    assert memory.free is not None
    share = memory.total * engine.gpu_memory_utilization
    if weight_bytes >= share:
        raise FitError(
            f"{takes}, and engine.gpu_memory_utilization = {engine.gpu_memory_utilization:g} leaves {_gib(share)} of "
            f"the GPU's {_gib(memory.total)} to weights and KV cache together: take a smaller model{_narrower(dtype)}, "
            'or spread it over several GPUs with engine.backend = "vllm" and engine.tensor_parallel_size'
        )
    if weight_bytes > memory.free:
        raise FitError(
            f"{takes}, and {_gib(memory.free)} of the GPU's {_gib(memory.total)} are free: another process holds the "
            "rest (nvidia-smi names it). End that, or take a smaller model"
        )


def pages_that_fit(
    settings: Settings, weight_bytes: int, bytes_per_token: int, max_model_len: int, memory: Memory
) -> int:
    """KV pages, with the weights loaded. Raises FitError."""
    is_cpu = memory.kind == "cpu"
    cache = _cpu_cache(settings) if is_cpu else _gpu_cache(settings, weight_bytes, memory)
    page_size = settings.engine.page_size
    needed = -(-max_model_len // page_size) * page_size * bytes_per_token
    if cache < needed:
        raise FitError(
            f"the KV cache gets {_gib(cache)} ({_derivation(settings, weight_bytes, memory)}), and one sequence of "
            f"{max_model_len} tokens needs {_gib(needed)}, at {bytes_per_token} bytes per token. "
            f"{_cure(settings, cache // (bytes_per_token * page_size) * page_size, is_cpu=is_cpu)}"
        )
    pages = kv_pages(settings, cache, bytes_per_token, max_model_len)
    takes = pages * page_size * bytes_per_token
    if is_cpu and memory.free is not None and takes > memory.free:
        raise FitError(
            f"the KV cache would take {_gib(takes)} ({pages} pages), and this machine has {_gib(memory.free)} of "
            f"memory left beside {_gib(weight_bytes)} of weights: lower engine.cpu_kv_cache_gib (now "
            f"{settings.engine.cpu_kv_cache_gib:g}) to less than {memory.free / GIB:.2f}, or scheduler.max_num_seqs, "
            "or engine.max_model_len"
        )
    return pages


@contextmanager
def start_errors_named(settings: Settings) -> Iterator[None]:
    """Around loading and allocating: what the allocator says becomes a FitError, for what the sizes did not foresee."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_memory_error(error):
            raise
        engine = settings.engine
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise FitError(
            f"memory ran out while the model was made ready ({said}): lower engine.gpu_memory_utilization (now "
            f"{engine.gpu_memory_utilization:g}; on a CPU engine.cpu_kv_cache_gib, now {engine.cpu_kv_cache_gib:g}), "
            f"engine.max_model_len (now {engine.max_model_len or 'not set'}) or "
            f"scheduler.max_num_seqs (now {settings.scheduler.max_num_seqs})"
        ) from error


def _cpu_cache(settings: Settings) -> int:
    return kv_bytes(settings, int(settings.engine.cpu_kv_cache_gib * GIB), weight_bytes=0)


def _gpu_cache(settings: Settings, weight_bytes: int, memory: Memory) -> int:
    assert memory.total is not None
    assert memory.free is not None
    return min(memory.free, kv_bytes(settings, memory.total, weight_bytes))


def _derivation(settings: Settings, weight_bytes: int, memory: Memory) -> str:
    engine, ratio = settings.engine, settings.model.kv_cache_ratio
    share = f"engine.gpu_memory_utilization = {engine.gpu_memory_utilization:g}, model.kv_cache_ratio = {ratio:g}"
    if memory.kind == "cpu":
        return f"of engine.cpu_kv_cache_gib = {engine.cpu_kv_cache_gib:g}; {share}"
    assert memory.total is not None
    assert memory.free is not None
    where = f"a GPU with {_gib(memory.total)}, beside {_gib(weight_bytes)} of weights, with {_gib(memory.free)} free"
    return f"of {where}; {share}"


def _cure(settings: Settings, length_that_fits: int, *, is_cpu: bool) -> str:
    raised = "engine.cpu_kv_cache_gib" if is_cpu else "engine.gpu_memory_utilization or model.kv_cache_ratio"
    if length_that_fits < 8:  # the least that engine.max_model_len takes
        return f"Raise {raised}, or take a smaller model"
    return f"Raise {raised}, or lower engine.max_model_len to {length_that_fits}"


def _narrower(dtype: torch.dtype) -> str:
    return ' or engine.dtype = "bfloat16"' if dtype.itemsize > 2 else ""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"
