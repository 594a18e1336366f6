"""Ingress: the outermost layer, pure ASGI. It opens a request's ledger, hands it on, and reports it at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from gateway.client_clock import TrustedProxies, request_start_ns
from gateway.connection import CONNECTION
from gateway.exchange import FAREWELL_SECONDS, Exchange, Receive, Scope, Send
from gateway.lag import LoopLag
from gateway.reporter import Reporter
from tracing.clock import Clock
from tracing.ledger import Ledger

EXCHANGE = "tokenline.exchange"
"""Key of the ASGI scope that holds the request's Exchange."""
UNTRACED = frozenset({"/healthz"})

App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Ingress:
    """Runs `app`, or the data-plane endpoint of the path, inside a ledger."""

    def __init__(
        self,
        app: App,
        data_plane: Mapping[str, App],
        reporter: Reporter,
        clock: Clock,
        worker: int,
        lag: LoopLag,
        proxies: TrustedProxies,
        unanswered: dict[str, Ledger],
    ) -> None:
        self._app = app
        self._data_plane = data_plane
        self._lag = lag
        self._proxies = proxies
        self._unanswered = unanswered
        self._reporter = reporter
        self._clock = clock
        self._worker = worker

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["path"] in UNTRACED:
            await self._answer_untraced(scope, receive, send)
            return
        exchange = Exchange(scope, receive, send, self._clock, self._worker, self._lag)
        scope[EXCHANGE] = exchange
        ledger = exchange.ledger
        start = exchange.headers.get(b"x-request-start")
        if start is not None and self._proxies.trust(scope.get("client")):
            started_ns = request_start_ns(start)
            ledger.client_network_ns = ledger.wall_ns - started_ns if started_ns else None
        self._unanswered[ledger.request_id] = ledger
        try:
            await self._data_plane.get(scope["path"], self._app)(scope, receive, exchange.send)
        finally:
            del self._unanswered[ledger.request_id]
            self._reporter.closed(exchange.close())

    async def _answer_untraced(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(FAREWELL_SECONDS):
                await self._app(scope, receive, send)
        except TimeoutError:
            await scope[CONNECTION].cut_off()
