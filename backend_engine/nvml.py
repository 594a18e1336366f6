"""What NVML says of the GPUs that this process may use: utilisation, memory, bandwidth, power; once a second.

Written against nvidia-ml-py 13 and tested with a stand-in of it; not verified on hardware yet. What a GPU does not
measure is absent, never 0. Bandwidth comes from GPM, which data-centre GPUs have since Hopper.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import msgspec
from prometheus_client import CollectorRegistry, Gauge

from tracing.instruments import build
from tracing.metrics import GPU

log = logging.getLogger(__name__)

SAMPLE_SECONDS = 1.0
_T = TypeVar("_T")


class GpuReading(msgspec.Struct, frozen=True):
    """One GPU in the last second. Ratios from 0 to 1; None: this GPU does not say. Fields are the metrics' names."""

    utilization_ratio: float | None = None
    memory_used_bytes: int | None = None
    memory_busy_ratio: float | None = None
    dram_bandwidth_ratio: float | None = None
    power_watts: float | None = None


class _Gpm:
    """Memory bandwidth of one GPU between this call and the one before."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self._now, self._before = nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()
        nvml.nvmlGpmSampleGet(handle, self._now)

    def bandwidth_ratio(self) -> float | None:
        nvml = self._nvml
        self._now, self._before = self._before, self._now
        nvml.nvmlGpmSampleGet(self._handle, self._now)
        asked = nvml.c_nvmlGpmMetricsGet_t()
        asked.version = nvml.NVML_GPM_METRICS_GET_VERSION
        asked.numMetrics = 1
        asked.sample1, asked.sample2 = self._before, self._now
        asked.metrics[0].metricId = nvml.NVML_GPM_METRIC_DRAM_BW_UTIL
        answer = nvml.nvmlGpmMetricsGet(asked).metrics[0]
        return float(answer.value) / 100 if answer.nvmlReturn == nvml.NVML_SUCCESS else None

    def close(self) -> None:
        for sample in (self._now, self._before):
            self._nvml.nvmlGpmSampleFree(sample)


class Nvml:
    """An open NVML and the GPUs that are looked at. Not thread-safe."""

    def __init__(self, nvml: Any, handles: Mapping[str, Any]) -> None:
        """`handles`: label -> NVML's handle."""
        self._nvml = nvml
        self._handles = dict(handles)
        self._gpm = {label: gpm for label, handle in handles.items() if (gpm := self._open_gpm(handle)) is not None}

    def _open_gpm(self, handle: Any) -> _Gpm | None:
        nvml = self._nvml
        try:
            return _Gpm(nvml, handle) if nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice else None
        except nvml.NVMLError:
            return None

    def read(self) -> dict[str, GpuReading]:
        """One reading for each GPU, by its label."""
        return {label: self._read(label, handle) for label, handle in self._handles.items()}

    def _read(self, label: str, handle: Any) -> GpuReading:
        nvml = self._nvml
        rates = self._told(lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
        memory = self._told(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        milliwatts = self._told(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        gpm = self._gpm.get(label)
        return GpuReading(
            utilization_ratio=None if rates is None else rates.gpu / 100,
            memory_used_bytes=None if memory is None else int(memory.used),
            memory_busy_ratio=None if rates is None else rates.memory / 100,
            dram_bandwidth_ratio=None if gpm is None else self._told(gpm.bandwidth_ratio),
            power_watts=None if milliwatts is None else milliwatts / 1000,
        )

    def total_bytes(self) -> dict[str, int]:
        """Memory of each GPU, by its label."""
        found = {
            label: self._told(lambda handle=handle: self._nvml.nvmlDeviceGetMemoryInfo(handle))  # type: ignore[misc]
            for label, handle in self._handles.items()
        }
        return {label: int(memory.total) for label, memory in found.items() if memory is not None}

    def _told(self, ask: Callable[[], _T]) -> _T | None:
        try:
            return ask()
        except self._nvml.NVMLError:
            return None

    def close(self) -> None:
        """Gives everything back."""
        for gpm in self._gpm.values():
            self._told(gpm.close)
        self._told(self._nvml.nvmlShutdown)


def open_nvml(
    environ: Mapping[str, str] = os.environ, load: Callable[[str], Any] = importlib.import_module
) -> Nvml | None:
    """NVML with the GPUs of CUDA_VISIBLE_DEVICES; None where there is no package, no driver or no GPU."""
    try:
        nvml = load("pynvml")
    except ImportError:
        log.info("GPU gauges are off: the package nvidia-ml-py is not installed (pip install '.[gpu]')")
        return None
    try:
        nvml.nvmlInit()
        handles = dict(_visible(nvml, environ.get("CUDA_VISIBLE_DEVICES")))
    except nvml.NVMLError as error:
        log.info("GPU gauges are off: %s", error)
        return None
    if not handles:
        nvml.nvmlShutdown()
        return None
    return Nvml(nvml, handles)


def _visible(nvml: Any, named: str | None) -> Iterable[tuple[str, Any]]:
    """(label, handle). As CUDA does, the list is read up to the first name that means nothing. NVML counts GPUs by
    their place on the bus; where they differ in kind, CUDA_DEVICE_ORDER=PCI_BUS_ID makes CUDA count so too."""
    count = nvml.nvmlDeviceGetCount()
    words = [str(index) for index in range(count)] if named is None else [word.strip() for word in named.split(",")]
    for word in words:
        if word.isdecimal() and int(word) < count:
            yield word, nvml.nvmlDeviceGetHandleByIndex(int(word))
        elif word.startswith(("GPU-", "MIG-")):
            try:
                yield word, nvml.nvmlDeviceGetHandleByUUID(word.encode())
            except nvml.NVMLError:
                return
        else:
            return


class GpuWatch:
    """A thread that reads NVML every second into gauges, from `start` to `close`."""

    def __init__(self, nvml: Nvml, registry: CollectorRegistry, seconds: float = SAMPLE_SECONDS) -> None:
        self._nvml = nvml
        self._seconds = seconds
        self._gauges = {metric.name: cast(Gauge, gauge) for metric, gauge in _gauges(registry)}
        self._ended = threading.Event()
        self.latest: Mapping[str, GpuReading] = {}
        self._thread = threading.Thread(target=self._run, name="nvml", daemon=True)

    def start(self) -> GpuWatch:
        """Reads now and from then on."""
        self._thread.start()
        return self

    def _run(self) -> None:
        while not self._ended.is_set():
            self.sample()
            self._ended.wait(self._seconds)

    def sample(self) -> None:
        """Reads once. What is not told any more, of a GPU that was lost for example, leaves its gauge."""
        latest = self._nvml.read()
        for label, reading in latest.items():
            for field, value in msgspec.structs.asdict(reading).items():
                gauge = self._gauges[f"tokenline_gpu_{field}"]
                if value is not None:
                    gauge.labels(label).set(value)
                elif label in self.latest and getattr(self.latest[label], field) is not None:
                    gauge.remove(label)
        self.latest = latest

    def close(self) -> None:
        """Ends the thread."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join(5)
        if not self._thread.is_alive():
            self._nvml.close()


def _gauges(registry: CollectorRegistry) -> Sequence[tuple[Any, Any]]:
    built = build(GPU, registry)
    return [(metric, built[metric.name]) for metric in GPU]


def watch_gpus(registry: CollectorRegistry) -> GpuWatch | None:
    """A watch over the GPUs here; None, and no gauges, where there are none."""
    nvml = open_nvml()
    return GpuWatch(nvml, registry).start() if nvml is not None else None


def in_words(readings: Mapping[str, GpuReading]) -> str:
    """For a line of the log: "GPU 0: 83 % busy, bandwidth 61 %"; empty where nothing is known."""
    parts = []
    for label, reading in readings.items():
        told = []
        if reading.utilization_ratio is not None:
            told.append(f"{reading.utilization_ratio:.0%} busy")
        if reading.dram_bandwidth_ratio is not None:
            told.append(f"bandwidth {reading.dram_bandwidth_ratio:.0%}")
        if told:
            parts.append(f"GPU {label}: {', '.join(told)}")
    return "; ".join(parts)
