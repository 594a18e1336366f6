"""Which device the settings ask for, opened with its model."""

from __future__ import annotations

from backend_engine.core.step import Device
from settings.schema import Settings
from tracing.clock import Clock


def open_device(settings: Settings, clock: Clock) -> Device:
    """The device that `engine.device` names, ready to launch steps. Errors (ValueError) name the setting to change."""
    engine = settings.engine
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        size = getattr(engine, name)
        if size > 1:
            raise ValueError(
                f"engine.{name} = {size}: this engine runs on one device. Set it to 1, or set "
                'engine.backend = "vllm", which spreads the model over several'
            )
    if engine.device == "simulated":
        from backend_engine.devices.simulated import SimulatedDevice, sleeper

        return SimulatedDevice(settings, clock, sleeper(clock))
    # torch and the model's code take seconds to import: only where a model really runs
    from backend_engine.devices.torch_device import open_torch_device

    return open_torch_device(settings, clock)
