"""How many KV pages a device gets, from its memory and the two shares that bound the cache."""

from __future__ import annotations

from settings.schema import Settings

GIB = 2**30


def kv_bytes(settings: Settings, base_bytes: int, weight_bytes: int) -> int:
    """Bytes for the KV cache: the smaller of what both settings allow.

    `engine.gpu_memory_utilization` is a share of the base for weights and cache together; `model.kv_cache_ratio` is a
    share of what weights leave. On a CPU the base is `engine.cpu_kv_cache_gib`, for the cache alone: pass 0 weights.
    """
    by_utilization = base_bytes * settings.engine.gpu_memory_utilization - weight_bytes
    by_ratio = (base_bytes - weight_bytes) * settings.model.kv_cache_ratio
    return max(0, int(min(by_utilization, by_ratio)))


def kv_pages(settings: Settings, cache_bytes: int, bytes_per_token: int, max_model_len: int) -> int:
    """Pages in `cache_bytes`, no more than all slots could use. Refuses a cache that cannot hold one full sequence."""
    page_size = settings.engine.page_size
    pages_per_sequence = -(-max_model_len // page_size)
    pages = min(cache_bytes // (bytes_per_token * page_size), settings.scheduler.max_num_seqs * pages_per_sequence)
    if pages < pages_per_sequence:
        needed_gib = pages_per_sequence * page_size * bytes_per_token / GIB
        raise ValueError(
            f"the KV cache gets {cache_bytes / GIB:.2f} GiB, and one sequence of {max_model_len} tokens needs "
            f"{needed_gib:.2f} GiB ({bytes_per_token} bytes per token): raise engine.cpu_kv_cache_gib (on a CPU), "
            "engine.gpu_memory_utilization or model.kv_cache_ratio, or lower engine.max_model_len to "
            f"{pages * page_size}"
        )
    return pages
