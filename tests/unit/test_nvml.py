"""GPU gauges from NVML, played by a stand-in of nvidia-ml-py: what it says, what it doesn't, and no GPU at all."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from engine_harness import ready
from prometheus_client import CollectorRegistry

from backend_engine import nvml as room
from backend_engine.metrics import EngineMetrics
from backend_engine.nvml import GpuReading, GpuWatch, in_words, open_nvml
from settings.schema import Settings
from tracing.clock import FakeClock

GIB = 2**30


class FakeNvml:
    """The module. `gpus`: what each says; a missing word is refused as unsupported."""

    NVML_SUCCESS = 0
    NVML_GPM_METRICS_GET_VERSION = 1
    NVML_GPM_METRIC_DRAM_BW_UTIL = 10

    class NVMLError(Exception):
        pass

    def __init__(self, *gpus: dict[str, Any], broken: str | None = None) -> None:
        self.gpus = list(gpus)
        self._broken = broken
        self.opened = self.gpm_samples = 0

    def nvmlInit(self) -> None:
        if self._broken:
            raise self.NVMLError(self._broken)
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> dict[str, Any]:
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes) -> dict[str, Any]:
        for gpu in self.gpus:
            if gpu.get("uuid") == uuid.decode():
                return gpu
        raise self.NVMLError("Not Found")

    def _said(self, gpu: dict[str, Any], word: str) -> Any:
        if word not in gpu:
            raise self.NVMLError("Not Supported")
        return gpu[word]

    def nvmlDeviceGetUtilizationRates(self, gpu: dict[str, Any]) -> Any:
        busy, memory = self._said(gpu, "rates")
        return SimpleNamespace(gpu=busy, memory=memory)

    def nvmlDeviceGetMemoryInfo(self, gpu: dict[str, Any]) -> Any:
        return SimpleNamespace(used=self._said(gpu, "used"), total=80 * GIB)

    def nvmlDeviceGetPowerUsage(self, gpu: dict[str, Any]) -> int:
        return self._said(gpu, "milliwatts")

    def nvmlGpmQueryDeviceSupport(self, gpu: dict[str, Any]) -> Any:
        return SimpleNamespace(isSupportedDevice=int("bytes_read" in gpu))

    def nvmlGpmSampleAlloc(self) -> dict[str, Any]:
        self.gpm_samples += 1
        return {}

    def nvmlGpmSampleFree(self, _sample: dict[str, Any]) -> None:
        self.gpm_samples -= 1

    def nvmlGpmSampleGet(self, gpu: dict[str, Any], sample: dict[str, Any]) -> None:
        sample["at"] = self._said(gpu, "bytes_read")

    def c_nvmlGpmMetricsGet_t(self) -> Any:
        return SimpleNamespace(metrics=[SimpleNamespace(metricId=0, nvmlReturn=-1, value=0.0)])

    def nvmlGpmMetricsGet(self, asked: Any) -> Any:
        """Percent of the possible between the two samples, as GPM does; its order tells which came first."""
        assert (asked.version, asked.numMetrics, asked.metrics[0].metricId) == (1, 1, 10)
        asked.metrics[0].value = float(asked.sample2["at"] - asked.sample1["at"])
        asked.metrics[0].nvmlReturn = self.NVML_SUCCESS
        return asked


def opened(fake: FakeNvml, **environ: str) -> room.Nvml | None:
    return open_nvml(environ, lambda name: {"pynvml": fake}[name])


def gpu(**said: Any) -> dict[str, Any]:
    return {"rates": (83, 41), "used": 20 * GIB, "milliwatts": 350_500} | said


def test_every_quantity_that_nvml_tells_is_read_in_ratios_bytes_and_watts() -> None:
    nvml = opened(FakeNvml(gpu()))
    assert nvml is not None
    assert nvml.read() == {"0": GpuReading(0.83, 20 * GIB, 0.41, None, 350.5)}
    assert nvml.total_bytes() == {"0": 80 * GIB}


def test_bandwidth_is_between_two_samples_where_the_gpu_measures_it() -> None:
    one = gpu(bytes_read=100)
    fake = FakeNvml(one)
    nvml = opened(fake)
    assert nvml is not None
    for read, ratio in ((160, 0.6), (160, 0.0), (250, 0.9)):
        one["bytes_read"] = read
        assert nvml.read()["0"].dram_bandwidth_ratio == pytest.approx(ratio)
    nvml.close()
    assert (fake.gpm_samples, fake.opened) == (0, 0)


def test_what_a_gpu_does_not_tell_is_absent_and_the_rest_is_not() -> None:
    nvml = opened(FakeNvml({"used": 5}, {}))
    assert nvml is not None
    assert nvml.read() == {"0": GpuReading(memory_used_bytes=5), "1": GpuReading()}


@pytest.mark.parametrize(
    ("named", "labels"),
    [
        (None, ["0", "1", "2"]),
        ("1", ["1"]),
        ("2, 0", ["2", "0"]),
        ("GPU-b,0", ["GPU-b", "0"]),
        ("0,7,1", ["0"]),
        ("0,GPU-x,1", ["0"]),
        ("", None),
        ("-1", None),
        ("NoDevFiles", None),
    ],
)
def test_only_gpus_that_cuda_may_use_are_looked_at(named: str | None, labels: list[str] | None) -> None:
    fake = FakeNvml(gpu(uuid="GPU-a"), gpu(uuid="GPU-b"), gpu(uuid="GPU-c"))
    nvml = opened(fake, **({} if named is None else {"CUDA_VISIBLE_DEVICES": named}))
    assert (None if nvml is None else list(nvml.read())) == labels
    assert fake.opened == (nvml is not None)


def test_without_the_package_the_driver_or_a_gpu_there_is_nothing() -> None:
    def missing(_name: str) -> Any:
        raise ModuleNotFoundError("pynvml")

    assert open_nvml({}, missing) is None
    assert opened(FakeNvml(gpu(), broken="Driver Not Loaded")) is None
    assert opened(FakeNvml()) is None


def test_without_a_gpu_no_gauge_is_there_either(monkeypatch) -> None:
    monkeypatch.setattr(room, "open_nvml", lambda: None)
    registry = CollectorRegistry()
    assert room.watch_gpus(registry) is None
    assert list(registry.collect()) == []


def test_gauges_follow_the_readings_and_leave_with_them() -> None:
    one = gpu(bytes_read=0)
    nvml = opened(FakeNvml(one, {"used": 7}))
    assert nvml is not None
    registry = CollectorRegistry()
    watch = GpuWatch(nvml, registry)

    def value(name: str, label: str = "0") -> float | None:
        return registry.get_sample_value(f"tokenline_gpu_{name}", {"gpu": label})

    watch.sample()
    assert (value("utilization_ratio"), value("memory_busy_ratio")) == (0.83, 0.41)
    assert (value("memory_used_bytes"), value("memory_used_bytes", "1")) == (20 * GIB, 7)
    assert (value("power_watts"), value("power_watts", "1")) == (350.5, None)
    assert value("dram_bandwidth_ratio") == 0.0
    assert value("dram_bandwidth_ratio", "1") is None
    del one["rates"]
    watch.sample()
    assert (value("utilization_ratio"), value("power_watts")) == (None, 350.5)


def test_the_engine_on_a_gpu_publishes_and_logs_them_until_it_ends(tmp_path, monkeypatch, caplog) -> None:
    fake = FakeNvml(gpu())
    monkeypatch.setattr(room, "open_nvml", lambda: opened(fake))
    settings = Settings.model_validate({"state_dir": tmp_path, "logging": {"log_gpu_util": True}})
    metrics = EngineMetrics(settings, FakeClock())
    metrics.describe(ready(device="cpu"))
    assert b"tokenline_gpu_" not in metrics.page("")[0]
    metrics.describe(ready(device="cuda"))
    deadline = time.monotonic() + 10
    while b'tokenline_gpu_power_watts{gpu="0"} 350.5' not in metrics.page("")[0]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    caplog.set_level("INFO")
    metrics.log_rates()
    assert caplog.messages[-1].endswith("device busy 0%, GPU 0: 83% busy")
    metrics.close()
    assert fake.opened == 0


def test_the_log_says_what_is_known() -> None:
    assert in_words({}) == ""
    assert in_words({"0": GpuReading(power_watts=3)}) == ""
    both = {"0": GpuReading(0.83, dram_bandwidth_ratio=0.61), "1": GpuReading(0.07)}
    assert in_words(both) == "GPU 0: 83% busy, bandwidth 61%; GPU 1: 7% busy"


def test_the_stand_in_has_the_names_of_the_real_package() -> None:
    real = pytest.importorskip("pynvml")
    wanted = [name for name in vars(FakeNvml) if name.startswith(("nvml", "NVML", "c_nvml"))]
    assert len(wanted) > 12
    assert [name for name in wanted if not hasattr(real, name)] == []
    assert real.NVML_GPM_METRIC_DRAM_BW_UTIL == FakeNvml.NVML_GPM_METRIC_DRAM_BW_UTIL
    asked = real.c_nvmlGpmMetricsGet_t()
    assert {"version", "numMetrics", "sample1", "sample2", "metrics"} <= {name for name, _ in asked._fields_}
    assert {"metricId", "nvmlReturn", "value"} <= {name for name, _ in asked.metrics[0]._fields_}
