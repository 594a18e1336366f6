"""What an engine's metrics page says of itself during a load test."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

PAGE_SECONDS = 2.0
PAGE_BYTES = 8 * 2**20
OPS_PORT = 9464

FIGURES = {
    "busy": ("tokenline_engine_busy_ratio",),
    "running": ("tokenline_engine_num_requests_running", "vllm:num_requests_running", "sglang:num_running_reqs"),
    "waiting": ("tokenline_engine_num_requests_waiting", "vllm:num_requests_waiting", "sglang:num_queue_reqs"),
    "kv_usage": (
        "tokenline_engine_kv_cache_usage_ratio", "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc",
        "sglang:token_usage",
    ),
    "gpu_utilization": ("tokenline_gpu_utilization_ratio",),
    "gpu_memory_bytes": ("tokenline_gpu_memory_used_bytes",),
    "gpu_bandwidth": ("tokenline_gpu_dram_bandwidth_ratio", "tokenline_gpu_memory_busy_ratio"),
}  # fmt: skip
"""Each figure, and the names under which engines publish it; the first that is there is taken."""
_SUMMED = ("running", "waiting", "gpu_memory_bytes")


class MetricsPage:
    """A page that is read again and again."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self._session = session

    async def read(self) -> dict[str, float]:
        """The figures that are there; empty where the page can't be read or has none."""
        try:
            async with asyncio.timeout(PAGE_SECONDS), self._session.get(self.url) as response:
                if response.status != 200:
                    return {}
                text = (await response.content.read(PAGE_BYTES)).decode("utf-8", "replace")
                # A page may come in several reads.
                while more := await response.content.read(PAGE_BYTES):
                    text += more.decode("utf-8", "replace")
                    if len(text) > PAGE_BYTES:
                        return {}
        except (TimeoutError, aiohttp.ClientError, OSError):
            return {}
        return figures_of(text)


def figures_of(text: str) -> dict[str, float]:
    """The figures of a page in Prometheus' text format."""
    wanted = tuple({name for names in FIGURES.values() for name in names})
    # Only the lines that matter are parsed: a page may have thousands.
    kept = "\n".join(line for line in text.splitlines() if line.startswith(wanted)) + "\n"
    found: dict[str, list[float]] = {}
    try:
        for family in text_string_to_metric_families(kept):
            for sample in family.samples:
                found.setdefault(sample.name, []).append(float(sample.value))
    except ValueError:
        return {}
    figures = {}
    for figure, names in FIGURES.items():
        values = next((found[name] for name in names if name in found), None)
        if values:
            figures[figure] = sum(values) if figure in _SUMMED else sum(values) / len(values)
    return figures


def gpu_figures(readings: Sequence[Mapping[str, float | None]]) -> dict[str, float]:
    """The same figures of GPUs that were read directly, by the names of the gauges. Unknown ones are absent."""
    names = {
        "gpu_utilization": ("utilization_ratio",), "gpu_memory_bytes": ("memory_used_bytes",),
        "gpu_bandwidth": ("dram_bandwidth_ratio", "memory_busy_ratio"),
    }  # fmt: skip
    figures = {}
    for figure, choices in names.items():
        found = [next((v for name in choices if (v := one.get(name)) is not None), None) for one in readings]
        values = [float(value) for value in found if value is not None]
        if values:
            figures[figure] = sum(values) if figure in _SUMMED else sum(values) / len(values)
    return figures


async def find_page(
    base_url: str, given: str | None, session: aiohttp.ClientSession, ops_url: str | None = None
) -> MetricsPage | None:
    """The page that was named, else the endpoint's own /metrics, else Tokenline's ops listener on the same host.

    `ops_url` says where that is. On another host it is somebody else's, whose figures are not the endpoint's.
    """
    parts = urlsplit(base_url)
    ops = ops_url.rstrip("/") if ops_url and urlsplit(ops_url).hostname == parts.hostname else None
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    own = f"{parts.scheme}://{parts.netloc}/metrics"
    guesses: Sequence[str] = (own, f"{ops or f'http://{host}:{OPS_PORT}'}/metrics")
    for url in (given,) if given else guesses:
        page = MetricsPage(url, session)
        if await page.read():
            return page
    return None
