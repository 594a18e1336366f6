"""Endpoints of the tenant listener: plain ASGI callables, so that nothing stands between a byte and its client."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod

from gateway.exchange import ClientLeft, ClientTooSlow, Exchange, Receive, Scope, Send, outcome_of
from gateway.ingress import EXCHANGE
from gateway.surfaces.shapes import ErrorShape, shape_for
from protocol.errors import ApiError
from tracing.ledger import CLIENT_TOO_SLOW, Outcome

log = logging.getLogger("tokenline.gateway")


class Endpoint(ABC):
    """One path. Whatever goes wrong in `serve` becomes a clear answer to the client and an outcome in the ledger."""

    method: str | None = "POST"
    """The only method taken (HEAD goes with GET); None: any."""

    errors: ErrorShape | None = None
    """How this path's clients read errors; None: as their headers say."""

    def __init__(self, hint: str | None = None) -> None:
        self._hint = hint

    @abstractmethod
    async def serve(self, exchange: Exchange) -> None:
        """Answers. Raises ApiError, or ClientLeft."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope[EXCHANGE]
        exchange.hint = self._hint
        exchange.errors = self.errors or shape_for(exchange.headers)
        ledger = exchange.ledger
        try:
            self._check_method(scope["method"])
            await self.serve(exchange)
            if ledger.outcome is Outcome.GATEWAY_ERROR:
                ledger.outcome = outcome_of(ledger.status)
        except ClientLeft:
            ledger.outcome = Outcome.CLIENT_CANCELLED
        except ClientTooSlow:
            ledger.outcome, ledger.error_code = Outcome.CLIENT_CANCELLED, CLIENT_TOO_SLOW
            await exchange.abort()
        except ApiError as error:
            if ledger.outcome is Outcome.GATEWAY_ERROR:
                ledger.outcome = outcome_of(error.status)
            await exchange.fail(error)
        except asyncio.CancelledError:
            await self._cut_off(exchange)
        except Exception:
            log.exception("request %s failed inside the gateway", ledger.request_id)
            await exchange.fail(ApiError(500, "gateway_error", "The gateway failed; its log names the cause."))

    async def _cut_off(self, exchange: Exchange) -> None:
        """The server is ending and its patience (server.drain_seconds) is over: the client is told, the ledger kept."""
        task = asyncio.current_task()
        if task is not None:
            task.uncancel()
        await exchange.fail(
            ApiError(503, "shutting_down", "The gateway is shutting down. Send the request again.", retry_after=2)
        )

    def _check_method(self, seen: str) -> None:
        taken = self.method
        if taken is None or seen == taken or (taken == "GET" and seen == "HEAD"):
            return
        raise ApiError(
            405, "method_not_allowed", f"This path takes {taken}, not {seen[:20]}.", extra_headers=(("allow", taken),)
        )
