"""What our engine needs beside the base installation."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

from cli.errors import CliError, Exit
from settings.schema import Settings

SIMULATED_MODULES = ("zmq",)
"""The simulated device computes nothing."""
MODEL_MODULES = ("torch", "transformers", "accelerate", "safetensors", "gguf", "jinja2", "numpy", *SIMULATED_MODULES)


def check_engine_installed(settings: Settings, find: Callable[[str], object] = find_spec) -> None:
    """Raises CliError that names what is missing and the two ways out."""
    modules = SIMULATED_MODULES if settings.engine.device == "simulated" else MODEL_MODULES
    missing = [module for module in modules if find(module) is None]
    if missing:
        raise CliError(
            f"Tokenline's own engine needs packages that are not installed: {', '.join(missing)}. "
            "Install them, in the repository, with: pip install '.[engine]'. "
            'To run without it: engine.backend = "none" and [[upstreams]] that answer',
            Exit.USAGE,
        )
