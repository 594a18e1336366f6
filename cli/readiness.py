"""Asking a listener whether it is ready."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx

TIMEOUT_SECONDS = 1.0


@dataclass
class Probe:
    """Ready when GET of `url` answers 200; through a Unix socket where one is given."""

    url: str
    unix_socket: Path | None = None
    _client: httpx.Client | None = field(default=None, init=False)

    def __call__(self) -> bool:
        """Whether it is ready now."""
        if self._client is None:
            # It is our own listener, asked whether it listens: whose certificate it has is no question here.
            transport = httpx.HTTPTransport(uds=str(self.unix_socket) if self.unix_socket else None, verify=False)
            self._client = httpx.Client(transport=transport, timeout=TIMEOUT_SECONDS, trust_env=False)
        try:
            return self._client.get(self.url).status_code == 200
        except httpx.HTTPError:
            return False

    def close(self) -> None:
        """Gives the connection back."""
        if self._client is not None:
            self._client.close()


def loopback_url(host: str, port: int, path: str, *, scheme: str = "http") -> str:
    """Where this machine reaches its own listener."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104  listened on, asked by loopback
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{path}"


Ready = Callable[[], bool]
