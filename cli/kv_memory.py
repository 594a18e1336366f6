"""How much memory the KV cache gets, as far as that can be told without loading the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from backend_engine.devices.sizing import GIB, kv_bytes
from settings.schema import Settings


@dataclass(frozen=True)
class KvMemory:
    """An upper bound, or why there is none."""

    size: int | None
    """Bytes at most; slots that need less take less."""
    is_before_weights: bool
    """The weights are still to be taken off."""
    words: str


def gpu_bytes() -> dict[str, int]:
    """Memory of each GPU that CUDA may use; empty where NVML finds none."""
    from backend_engine.nvml import open_nvml

    nvml = open_nvml()
    if nvml is None:
        return {}
    try:
        return nvml.total_bytes()
    finally:
        nvml.close()


def kv_memory(settings: Settings, ask_gpus: Callable[[], dict[str, int]] = gpu_bytes) -> KvMemory | None:
    """None where no engine runs."""
    engine = settings.engine
    if engine.backend == "none":
        return None
    if engine.backend == "vllm":
        return KvMemory(None, False, "sized by vLLM, from engine.gpu_memory_utilization")
    if engine.device == "simulated":
        return KvMemory(None, False, "the simulated device has no memory")
    gpus = ask_gpus() if engine.device != "cpu" else {}
    if gpus:
        label, total = next(iter(gpus.items()))
        size = kv_bytes(settings, total, weight_bytes=0)
        return KvMemory(size, True, f"at most {_gib(size)}, before weights, of {_gib(total)} of GPU {label}")
    if engine.device == "cuda":
        return KvMemory(None, False, "known when the engine starts: NVML finds no GPU here, or is not installed")
    size = kv_bytes(settings, int(engine.cpu_kv_cache_gib * GIB), weight_bytes=0)
    where = (
        "on a CPU" if engine.device == "cpu" else "on a CPU, which is where it runs unless torch finds a CUDA device"
    )
    return KvMemory(size, False, f"at most {_gib(size)}, beside the weights, {where}")


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB ({size} bytes)"
