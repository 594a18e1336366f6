"""Health of upstreams: a light GET every few seconds, so that `tokenline_upstream_up` is true before a request fails.

Any answer below 500 is up: a 401 or 404 comes from a server that works.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence

import httpx
import msgspec

from settings.schema import ENGINE_UPSTREAM, Settings

INTERVAL_SECONDS = 5.0
TIMEOUT_SECONDS = 3.0

Report = Callable[[str, bool | None], None]
"""(upstream, whether it is up; None: it is checked no more)."""


class Probe(msgspec.Struct, frozen=True):
    """One upstream and how it is asked."""

    upstream: str
    url: str
    unix_socket: str | None = None
    api_key_env: str | None = None


def probes_of(settings: Settings) -> list[Probe]:
    """A probe for the co-located engine and for each configured upstream."""
    probes = []
    if settings.has_engine:
        socket = settings.engine_unix_socket
        probes.append(Probe(ENGINE_UPSTREAM, f"{settings.engine_origin}/health", str(socket) if socket else None))
    for upstream in settings.upstreams:
        if upstream.unix_socket:
            probes.append(Probe(upstream.name, "http://upstream/v1/models", upstream.unix_socket, upstream.api_key_env))
        elif upstream.url:
            probes.append(Probe(upstream.name, f"{upstream.url.rstrip('/')}/models", None, upstream.api_key_env))
    return probes


class Health:
    """Asks every upstream every INTERVAL_SECONDS, each on its own: a frozen one delays no other.

    Proxies of the environment are not used, since the relay does not use them either.
    """

    def __init__(self, probes: Sequence[Probe], report: Report, environment: Mapping[str, str] = os.environ) -> None:
        self._report = report
        self._environment = environment
        self._probes = set(probes)
        self._changed = asyncio.Event()

    def follow(self, probes: Sequence[Probe]) -> None:
        """Asks these from now on. Those that were asked alike before are not disturbed."""
        self._probes = set(probes)
        self._changed.set()

    async def run(self) -> None:
        """Asks until cancelled."""
        asked: dict[Probe, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                self._changed.clear()
                for probe in asked.keys() - self._probes:
                    asked.pop(probe).cancel()
                    if probe.upstream not in {other.upstream for other in self._probes}:
                        self._report(probe.upstream, None)
                for probe in self._probes - asked.keys():
                    name = f"health of {probe.upstream}"
                    asked[probe] = group.create_task(_watch_one(probe, self._report, self._environment), name=name)
                await self._changed.wait()


async def _watch_one(probe: Probe, report: Report, environment: Mapping[str, str]) -> None:
    transport = httpx.AsyncHTTPTransport(uds=probe.unix_socket) if probe.unix_socket else None
    key = environment.get(probe.api_key_env) if probe.api_key_env else None
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(
        transport=transport, headers=headers, timeout=TIMEOUT_SECONDS, trust_env=False
    ) as client:
        while True:
            report(probe.upstream, await is_up(client, probe.url))
            await asyncio.sleep(INTERVAL_SECONDS)


async def is_up(client: httpx.AsyncClient, url: str) -> bool:
    """Whether something that is not broken answers at `url`."""
    try:
        async with asyncio.timeout(TIMEOUT_SECONDS), client.stream("GET", url) as response:
            return response.status_code < 500
    except (httpx.HTTPError, TimeoutError, OSError, UnicodeError):
        return False
