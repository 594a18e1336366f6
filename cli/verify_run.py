"""Runs a verification: of a gateway that runs already, or of a Tokenline started for it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from cli.errors import CliError, Exit
from cli.ops import ops_client
from cli.output import say
from cli.temporary import temporary_gateway
from loadtest.conformance.finding import Report
from loadtest.conformance.records import OpsAccess
from loadtest.conformance.verify import Asked, NotReached, verify
from tracing.clock import SystemClock

SELF_MODEL = "tokenline-verify"


def verify_given(
    base_url: str,
    *,
    key_env: str | None,
    model: str,
    metrics_url: str | None,
    ops_url: str | None,
    config: Path | None,
    upstream: tuple[str, int],
    wait_seconds: float,
    surfaces: tuple[str, ...],
    environ: Mapping[str, str] = os.environ,
) -> Report:
    """A gateway that its owner points at the scripted upstream."""
    for option, url in (("--base-url", base_url), ("--metrics-url", metrics_url)):
        if url is not None and (urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname):
            raise CliError(f"{option} {url!r}: must be like http://127.0.0.1:8080/api", Exit.USAGE)
    key = environ.get(key_env) if key_env else None
    if key_env and not key:
        raise CliError(f"--key-env {key_env}: that variable is not set", Exit.USAGE)
    host, port = upstream
    asked = Asked(
        base_url=base_url,
        model=model,
        key=key,
        upstream_host=host,
        upstream_port=port,
        metrics_url=metrics_url,
        ops=_ops_access(ops_url, config) if ops_url else None,
        surfaces=surfaces,
        wait_seconds=wait_seconds,
    )

    async def tell(url: str) -> None:
        say(instructions(url, model))

    return _run(asked, tell)


def verify_own(surfaces: tuple[str, ...]) -> Report:
    """A Tokenline gateway on free ports, with a state folder that is gone afterwards."""
    with ExitStack() as stack:
        # The upstream's port must be in the configuration before the upstream listens on it.
        gateway = stack.enter_context(temporary_gateway(SELF_MODEL))
        asked = Asked(
            base_url=gateway.base_url,
            model=SELF_MODEL,
            key=gateway.key,
            upstream_port=gateway.upstream_port,
            metrics_url=f"{gateway.ops_url}/metrics",
            ops=OpsAccess(gateway.ops_url, gateway.admin_key),
            surfaces=surfaces,
            wait_seconds=30,
        )

        async def ready(_url: str) -> None:
            return

        return _run(asked, ready)


def instructions(url: str, model: str) -> str:
    """How a gateway is pointed at the scripted upstream."""
    return f"""The scripted upstream serves at {url} (any key). Point the gateway's model {model!r} at it.
Tokenline (tokenline.toml):

  [[upstreams]]
  name = "scripted"
  url = "{url}"
  [[models]]
  name = "{model}"
  targets = [{{ upstream = "scripted" }}]

LiteLLM (config.yaml):

  model_list:
    - model_name: {model}
      litellm_params: {{ model: openai/{model}, api_base: "{url}", api_key: none }}
"""


def _ops_access(ops_url: str, config: Path | None) -> OpsAccess:
    """The admin API's address and key, found as the other commands find them."""
    client = ops_client(ops_url, config)
    return OpsAccess(client.url, client.admin_key)


def _run(asked: Asked, on_upstream: Callable[[str], Awaitable[None]]) -> Report:
    console = Console(stderr=True, markup=False, highlight=False)
    columns = (BarColumn(), TextColumn("{task.completed:.0f}/{task.total:.0f}"), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=console, transient=True) as bar:
        task = bar.add_task("starting", total=1)

        def progress(done: int, total: int, now: str) -> None:
            bar.update(task, completed=done, total=max(total, 1), description=now)

        try:
            return asyncio.run(verify(asked, SystemClock(), on_upstream=on_upstream, progress=progress))
        except NotReached as error:
            raise CliError(
                f"{asked.base_url} never led to the scripted upstream within {asked.wait_seconds:g} s. "
                f"Its last answer for model {asked.model!r} was: {error}",
                Exit.UNREACHABLE,
            ) from None
        except ConnectionError as error:
            raise CliError(str(error), Exit.UNREACHABLE) from None
        except OSError as error:
            raise CliError(
                f"the scripted upstream can't listen on {asked.upstream_host}:{asked.upstream_port}: {error}; "
                "choose another --upstream-port",
                Exit.USAGE,
            ) from None
