"""Ingress: the outermost layer, pure ASGI. It opens a request's ledger, hands it on, and reports it at the end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from gateway.exchange import Exchange, Receive, Scope, Send
from gateway.reporter import Reporter
from tracing.clock import Clock

EXCHANGE = "tokenline.exchange"
"""Key of the ASGI scope that holds the request's Exchange."""
UNTRACED = frozenset({"/healthz"})

App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Ingress:
    """Runs `app` inside a ledger."""

    def __init__(self, app: App, reporter: Reporter, clock: Clock, worker: int) -> None:
        self._app = app
        self._reporter = reporter
        self._clock = clock
        self._worker = worker

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in UNTRACED:
            await self._app(scope, receive, send)
            return
        exchange = Exchange(scope, receive, send, self._clock, self._worker)
        scope[EXCHANGE] = exchange
        try:
            await self._app(scope, receive, exchange.send)
        finally:
            self._reporter.closed(exchange.close())
