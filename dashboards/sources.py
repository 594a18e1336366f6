"""Where alerts and panels lead, and what they are made for."""

from __future__ import annotations

import re

import msgspec

from settings.schema import Settings, SloSettings

GENERATED = "Made by `tokenline dashboards build`; change the settings or the code and build again."
JOB = "tokenline"
"""The scrape job's name, which rules and dashboards rely on."""


class Places(msgspec.Struct, frozen=True):
    """Addresses as people who look at dashboards and alerts reach them. None ends in a slash."""

    console: str
    grafana: str
    runbooks: str
    targets: tuple[str, ...]
    """host:port of each gateway's ops listener."""
    alertmanagers: tuple[str, ...]
    tempo: str | None = None
    """Base URL of a Tempo; without one traces open in the console alone."""


def default_places(settings: Settings) -> Places:
    """Everything on this machine."""
    server = settings.server
    host = "127.0.0.1" if server.ops_host in ("0.0.0.0", "::") else server.ops_host  # noqa: S104
    ops = f"[{host}]:{server.ops_port}" if ":" in host else f"{host}:{server.ops_port}"
    return Places(
        console=f"http://{ops}/console",
        grafana="http://127.0.0.1:3000",
        runbooks="docs/runbooks",
        targets=(ops,),
        alertmanagers=("127.0.0.1:9093",),
    )


def objectives(settings: Settings) -> list[tuple[str, SloSettings]]:
    """(selector of models, objective): each model that has its own, then all others."""
    named = {name: slo for name, slo in settings.slo.items() if name != "default"}
    # RE2 takes backslashes before punctuation; inside a PromQL string each is written twice.
    others = "|".join(re.escape(name) for name in named).replace("\\", "\\\\")
    default = settings.slo.get("default", SloSettings())
    return [
        *((f'model="{_quoted(name)}"', slo) for name, slo in named.items()),
        (f'model!~"{_quoted_regex(others)}"' if named else "", default),
    ]


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _quoted_regex(text: str) -> str:
    return text.replace('"', '\\"')
