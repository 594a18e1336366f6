"""The relay, the hot path: authenticate -> choose -> admit -> send -> stream. Every surface goes through it."""

from __future__ import annotations

import asyncio

from gateway.admission import Admission
from gateway.answers import Call, answer
from gateway.exchange import ClientTooSlow, Exchange
from gateway.keys.credentials import presented_key
from gateway.keys.record import KeyRecord
from gateway.keys.verify import KeyVerifier
from gateway.limits.grant import Grant, Limiter, tokens_of
from gateway.reporter import Reporter
from gateway.surfaces.openai import ParsedRequest
from gateway.surfaces.stream import count_by_events, forget_answer
from gateway.surfaces.surface import Surface
from gateway.upstreams.attempt import connection_error, request_headers, retry_after
from gateway.upstreams.balance import Balancer, Upkeep
from gateway.upstreams.client import UpstreamClient
from gateway.upstreams.deadlines import Deadlines, Phase
from gateway.upstreams.http1 import FoundDead, UpstreamFault
from gateway.upstreams.pool import UpstreamAnswer
from gateway.upstreams.retries import RetryBudget
from gateway.upstreams.router import Route, Router, Target
from protocol.errors import ApiError
from protocol.ids import new_span_id
from settings.schema import ServerSettings
from tracing.ledger import Admitted, Attempt, Ledger, Outcome

MAX_STALE = 2
"""Pooled connections found dead before a request is failed."""


class Relay:
    """Answers requests by asking upstreams. One per worker."""

    def __init__(
        self,
        limits: ServerSettings,
        verifier: KeyVerifier,
        limiter: Limiter,
        router: Router,
        admission: Admission,
        client: UpstreamClient,
        reporter: Reporter,
        balancer: Balancer,
    ) -> None:
        self._limits = limits
        self._verifier = verifier
        self._limiter = limiter
        self.router = router
        self._admission = admission
        self._client = client
        self._reporter = reporter
        self._balancer = balancer
        self._retries = RetryBudget()

    def reload(self, limits: ServerSettings, router: Router) -> None:
        """For requests that route from now on; those that have go on with the table that they have looked into."""
        self._limits = limits
        self.router = router

    async def serve(self, exchange: Exchange, surface: Surface) -> None:
        """One request from its headers to its last byte. Raises ApiError where the client must be told, ClientLeft."""
        ledger, clock = exchange.ledger, exchange.clock
        ledger.surface = surface.name
        key = await self._identify(exchange)
        grant = await self._let_in(exchange, key)
        ledger.authenticated = clock.mono_ns()
        try:
            await self._relay(exchange, surface, key)
        finally:
            if grant is not None:
                grant.leave(tokens_of(ledger.usage))

    async def _relay(self, exchange: Exchange, surface: Surface, key: KeyRecord) -> None:
        ledger, clock = exchange.ledger, exchange.clock
        body = await exchange.body(self._limits.max_body_bytes, self._limits.receive_timeout_seconds)
        ledger.body_read = clock.mono_ns()
        request, route = self._choose(exchange, surface, key, body)
        ledger.routed = clock.mono_ns()
        self._reporter.admitted(
            Admitted(ledger.request_id, ledger.worker, ledger.model, surface.name, ledger.stream, ledger.ingress)
        )
        with exchange.watching():
            await self._admit(ledger, key)
            ledger.admitted = clock.mono_ns()
            try:
                await self._answer(exchange, surface, request, route)
            finally:
                self._admission.leave(key.id)

    async def _admit(self, ledger: Ledger, key: KeyRecord) -> None:
        """Takes a place in flight; a refusal is the gateway's own, whatever its status says."""
        try:
            await self._admission.enter(key.id)
        except ApiError:
            ledger.outcome = Outcome.QUEUE_REJECTED
            raise

    async def authenticate(self, exchange: Exchange) -> KeyRecord:
        """Whose request this is, on headers alone: a stranger's body is never read."""
        key = await self._identify(exchange)
        exchange.ledger.authenticated = exchange.clock.mono_ns()
        return key

    async def _identify(self, exchange: Exchange) -> KeyRecord:
        key = await self._verifier.verify(presented_key(exchange.scope["headers"]))
        exchange.ledger.key_alias, exchange.ledger.team = key.alias, key.team
        return key

    async def _let_in(self, exchange: Exchange, key: KeyRecord) -> Grant | None:
        """Asks the key's limits; the answer, whatever it becomes, tells what is left of them."""
        try:
            grant = await self._limiter.enter(key, exchange.ledger.request_id)
        except ApiError as error:
            if error.status != 403:
                exchange.ledger.outcome = Outcome.RATE_LIMITED
            raise
        if grant is not None:
            exchange.more_headers = grant.headers
        return grant

    def _choose(self, exchange: Exchange, surface: Surface, key: KeyRecord, body: bytes) -> tuple[ParsedRequest, Route]:
        if exchange.headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise ApiError(415, "unsupported_encoding", "Compressed request bodies are not accepted. Send it plain.")
        ledger = exchange.ledger
        request = surface.parse(body, exchange.scope["query_string"])
        ledger.stream, ledger.choices = request.stream, request.choices
        if not key.may_use(request.model):
            allowed = f"This key may not use {request.model!r}. It may use: {', '.join(key.models)}."
            raise ApiError(403, "model_not_allowed", allowed, param="model")
        route = surface.narrow(self.router.choose(request.model))
        ledger.model = route.model
        surface.body(request, route.targets[0])  # made here, so that its making counts as routing
        return request, route

    async def _answer(self, exchange: Exchange, surface: Surface, request: ParsedRequest, route: Route) -> None:
        """Tries the route's targets in turn until one begins to answer."""
        ledger = exchange.ledger
        spent = (exchange.clock.mono_ns() - ledger.ingress) / 1e9
        total_at = asyncio.get_running_loop().time() + self._limits.request_timeout_seconds - spent
        targets = self._balancer.order(route, request.opening if route.affinity else b"")
        self._retries.earn()
        stale = 0
        while True:
            target = targets.pop(0)
            deadlines = Deadlines(self._limits, total_at, target.upstream.limits, exchange.taken_at)
            call = Call(exchange, surface, request, target, deadlines)
            try:
                await self._attempt(call, may_pass_on=bool(targets))
                return
            except StaleConnection as error:
                stale += 1
                if stale > MAX_STALE:
                    raise error.told from error
                targets.append(target)  # another one first, where there is one
            except ApiError as error:
                out_of_time = call.deadlines.phase is Phase.TOTAL and error.status == 504
                if exchange.started or out_of_time or not self._may_go_on(error, targets, len(ledger.attempts) - stale):
                    raise

    def _may_go_on(self, error: ApiError, targets: list[Target], tries: int) -> bool:
        """Whether another target may be asked after this failure. Dead pooled connections are no tries."""
        is_upstreams_fault = error.status >= 500 or isinstance(error, UpstreamBusy)
        is_left = bool(targets) and tries < self._limits.max_attempts
        return is_upstreams_fault and is_left and self._retries.spend()

    async def _attempt(self, call: Call, *, may_pass_on: bool) -> None:
        """One try, with clocks of its own. Raises ApiError when it failed, StaleConnection when it never arrived."""
        exchange, upstream = call.exchange, call.target.upstream.name
        ledger = exchange.ledger
        forget_answer(ledger)
        attempt = Attempt(len(ledger.attempts) + 1, upstream, call.target.model, new_span_id())
        ledger.attempts.append(attempt)
        ledger.upstream = upstream
        upkeep = self._balancer.of(call.target.upstream)
        upkeep.breaker.tried()
        upkeep.outstanding += 1
        if may_pass_on:
            # Where nobody else could answer, waiting is better than failing: the checks may be wrong.
            upkeep.strikers[id(call)] = lambda: None if exchange.started else call.deadlines.strike()
        try:
            async with call.deadlines:
                response = await self._send(call, attempt)
                try:
                    if response.status == 429 and may_pass_on:
                        raise busy(upkeep, attempt, response)
                    await answer(call, attempt, response, self._reporter)
                finally:
                    response.close()
            upkeep.breaker.succeeded()
        except TimeoutError as error:
            if call.deadlines.is_client_slow:
                attempt.error = "cancelled"
                upkeep.breaker.gave_up()
                raise ClientTooSlow from error
            attempt.error = str(call.deadlines.phase)
            upkeep.breaker.failed()
            raise call.deadlines.error(upstream) from error
        except StaleConnection:
            upkeep.breaker.gave_up()
            raise
        except ApiError as error:
            attempt.error = attempt.error or error.code
            # A client's error is no fault of the upstream; it answered.
            upkeep.breaker.failed() if error.status >= 500 else upkeep.breaker.succeeded()
            raise
        except asyncio.CancelledError:
            attempt.error = "cancelled"
            upkeep.breaker.gave_up()
            raise
        finally:
            upkeep.outstanding -= 1
            upkeep.strikers.pop(id(call), None)
            attempt.end = attempt.end or exchange.clock.mono_ns()
            reached = (ledger.first_token if ledger.stream else attempt.upstream_headers) or 0
            if reached and not attempt.error:
                upkeep.saw_first_token((reached - attempt.connect_start) / 1e9)
            count_by_events(ledger)

    async def _send(self, call: Call, attempt: Attempt) -> UpstreamAnswer:
        """The upstream's answer from its headers on."""
        target = call.target
        try:
            response = await self._client.post(
                target.upstream,
                call.url,
                request_headers(call.exchange, attempt, target),
                call.surface.body(call.request, target),
                attempt,
                call.deadlines,
            )
        except UpstreamFault as error:
            attempt.error, told = connection_error(error, target.upstream.name)
            if isinstance(error, FoundDead):
                raise StaleConnection(told) from error
            raise told from error
        attempt.upstream_headers = call.exchange.clock.mono_ns()
        call.exchange.woke(attempt.upstream_headers)
        attempt.server_timing = response.header(b"server-timing")[:1024] or None
        attempt.status = response.status
        attempt.upstream_request_id = response.header(b"x-request-id")[:128] or None
        return response


class UpstreamBusy(ApiError):
    """An upstream's 429, while another target may still be asked."""


def busy(upkeep: Upkeep, attempt: Attempt, response: UpstreamAnswer) -> UpstreamBusy:
    """It is left alone for as long as it asks."""
    wait = retry_after(response)
    attempt.error = "status"
    upkeep.cool(1.0 if wait is None else wait)
    return UpstreamBusy(429, "rate_limit_exceeded", f"The upstream {attempt.upstream!r} is busy.", retry_after=wait)


class StaleConnection(Exception):
    """The upstream had closed a pooled connection before it answered: try again on another one."""

    def __init__(self, told: ApiError) -> None:
        super().__init__(told.message)
        self.told = told
