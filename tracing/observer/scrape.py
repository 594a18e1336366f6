"""The /metrics page: our own metrics and, below them, the co-located engine's page in the same format."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.parser import text_string_to_metric_families

from tracing.observer.exposition import OPENMETRICS, encoder_for

ENGINE_TIMEOUT_SECONDS = 0.5
MAX_ENGINE_BYTES = 4 * 2**20
_EOF = b"# EOF\n"


class _Parsed:
    """A page that was read, as something that can be written in another format."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families


class MetricsPage:
    """Renders the page. The engine's part is left out when the engine does not answer in time."""

    def __init__(
        self, registry: CollectorRegistry, engine_socket: Path | None, engine_origin: str = "http://engine"
    ) -> None:
        """`engine_socket`: None for an engine on a loopback port, which `engine_origin` names then."""
        self._registry = registry
        self._engine_socket = engine_socket
        self._engine_origin = engine_origin

    async def render(self, accept: str) -> tuple[bytes, str]:
        """The page and its content type, as `accept` asks (Prometheus text or OpenMetrics)."""
        write, content_type = encoder_for(accept)
        # In a thread: a page of thousands of series takes tens of milliseconds, which records should not wait for.
        own, engine = await asyncio.gather(asyncio.to_thread(write, self._registry), self._engine_page(accept))
        if engine is None:
            return own, content_type
        body, engine_type = engine
        if _is_openmetrics(engine_type) != _is_openmetrics(content_type):
            families = text_string_to_metric_families(body.removesuffix(_EOF).decode())
            encode, _ = choose_encoder(accept)
            body = await asyncio.to_thread(encode, _Parsed(list(families)))
        if _is_openmetrics(content_type):
            return own.removesuffix(_EOF) + body.removesuffix(_EOF) + _EOF, content_type
        return own + body, content_type

    async def _engine_page(self, accept: str) -> tuple[bytes, str] | None:
        socket = self._engine_socket
        if socket is not None and not socket.exists():
            return None
        transport = httpx.AsyncHTTPTransport(uds=str(socket) if socket else None)
        try:
            async with (
                asyncio.timeout(ENGINE_TIMEOUT_SECONDS),
                httpx.AsyncClient(transport=transport, trust_env=False) as client,
                client.stream("GET", f"{self._engine_origin}/metrics", headers={"accept": accept}) as response,
            ):
                if response.status_code != 200:
                    return None
                body = b""
                async for chunk in response.aiter_bytes():
                    body += chunk
                    if len(body) > MAX_ENGINE_BYTES:
                        return None
                return body, response.headers.get("content-type", "")
        except (httpx.HTTPError, TimeoutError, OSError):
            return None


def _is_openmetrics(content_type: str) -> bool:
    return content_type.startswith(OPENMETRICS)
