"""`tokenline up`, `gateway`, `engine`: run the processes until asked to end."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from cli.errors import EXIT_CODES, CliError, Exit
from cli.options import Backend, Config, Device, Json, Model

STATE = """The first start makes a key for apps and an admin key, and keeps them in the state folder
(TOKENLINE_STATE_DIR) for this user alone. Ctrl-C ends everything in order; a second one at once."""

UP_EPILOG = f"""
Examples:

\b
  tokenline up                               the demo model on this machine
  tokenline up --model Qwen/Qwen3-0.6B       a model from the hub
  tokenline up --model ./model.gguf --device cpu
  tokenline up --device simulated            no model: an engine with known times
  tokenline up --backend vllm --model M      vLLM in our engine's place: docs/vllm.md
  tokenline up --config tokenline.toml       everything else: docs/configuration.md

{STATE}

{EXIT_CODES}
"""
GATEWAY_EPILOG = f"""
Example, in front of a server that runs already:

\b
  cat > tokenline.toml <<END
  [[upstreams]]
  name = "vllm"
  url = "http://10.0.0.5:8000/v1"
  [[models]]
  name = "llama"
  targets = [{{ upstream = "vllm" }}]
  END
  tokenline gateway --config tokenline.toml

{STATE}

{EXIT_CODES}
"""
ENGINE_EPILOG = f"""
Example, with the gateway on another machine (url = "http://HOST:8080/v1" among its [[upstreams]]):

\b
  TOKENLINE_SERVER__HOST=0.0.0.0 tokenline engine --model smollm2

vLLM from the same settings, and the command line that this makes of them:

\b
  tokenline engine --backend vllm --config tokenline.toml
  tokenline engine --backend vllm --config tokenline.toml --dry-run

With server.api_key set the engine wants that key (name it by api_key_env at the gateway); without one it takes every
request, so let only the gateway reach it.

{EXIT_CODES}
"""


def up(
    model: Model = None,
    device: Device = None,
    backend: Backend = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Runs everything: gateway, observer and, unless engine.backend is "none", the engine.

    Prints base_url, a key and a curl line when they are ready to be used.
    """
    from cli.instance import run_up

    def load() -> Any:
        loaded = _load(config, model, device, backend)
        if (model or device) and loaded.settings.engine.backend == "none":
            raise CliError('--model and --device are for the engine, but engine.backend is "none"', Exit.USAGE)
        return loaded

    run_up(load, as_json=as_json)


def gateway(config: Config = None, as_json: Json = False) -> None:
    """Runs the gateway and its observer, in front of [[upstreams]]; no engine."""
    from cli.instance import run_gateway

    run_gateway(lambda: _load(config, None, None), as_json=as_json)


def engine(
    model: Model = None,
    device: Device = None,
    backend: Backend = None,
    config: Config = None,
    is_dry: Annotated[bool, typer.Option("--dry-run", help="Print vLLM's command line and start nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Runs the engine alone, on server.host and server.port."""
    loaded = _load(config, model, device, backend)
    if is_dry:
        from cli.vllm import show_command

        show_command(loaded, as_json=as_json)
        return
    from cli.instance import run_engine_alone

    run_engine_alone(loaded, as_json=as_json)


def _load(config: Path | None, model: str | None, device: str | None, backend: str | None = None) -> Any:
    from settings.loader import load_settings

    flags: dict[str, tuple[str, Any]] = {}
    if model is not None:
        if not model.strip():
            raise CliError("--model is empty; name a folder, a GGUF file, a hub id, or smollm2", Exit.USAGE)
        flags["engine.model"] = ("--model", model)
    if device is not None:
        flags["engine.device"] = ("--device", device)
    if backend is not None:
        flags["engine.backend"] = ("--backend", backend)
    return load_settings(config, flags=flags)


def register(app: typer.Typer) -> None:
    """Adds the three verbs."""
    app.command(epilog=UP_EPILOG, short_help="Runs everything: gateway, observer, engine.")(up)
    app.command(epilog=GATEWAY_EPILOG, short_help="Runs the gateway in front of other servers.")(gateway)
    app.command(epilog=ENGINE_EPILOG)(engine)
