"""A relay worker: one process that carries bytes on the tenant port."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn

from gateway.admission import Admission
from gateway.app import build_app, data_plane
from gateway.client_clock import TrustedProxies
from gateway.client_protocol import Protocol
from gateway.ingress import Ingress
from gateway.keys.plans import Plans
from gateway.keys.stores import LOOKUP_SECONDS, open_store
from gateway.keys.verify import KeyVerifier
from gateway.keys.watch import StoredKeys, watch_store
from gateway.lag import LoopLag
from gateway.limits.choice import limiter_from
from gateway.listeners import BACKLOG, open_listeners
from gateway.open_files import allow_open_files
from gateway.relay import Relay
from gateway.reporter import Reporter
from gateway.upstreams.balance import Balancer
from gateway.upstreams.client import UpstreamClient
from gateway.upstreams.health import HealthChecks
from gateway.upstreams.router import router_from
from settings import Settings
from settings.feed import Feed
from tracing import garbage
from tracing.clock import Clock, SystemClock, host_identity
from tracing.ledger import Ledger, WorkerState


class Worker:
    """Everything that a relay worker is made of, and its beginning and end."""

    def __init__(self, settings: Settings, worker: int, clock: Clock, feed: Feed | None = None) -> None:
        self._number = worker
        self._feed = feed
        self.clock = clock
        self._balancer = Balancer(clock, random.SystemRandom())
        self._client = UpstreamClient(clock)
        self._reporter = Reporter(settings.intake_socket, self._state)
        api_key = settings.server.api_key
        self._lag = LoopLag(clock)
        self._admission = Admission(settings.server)
        self._unanswered: dict[str, Ledger] = {}
        self._keys = StoredKeys(lambda: open_store(settings, LOOKUP_SECONDS))
        self._plans = Plans(settings.plans, settings.keys.default_plan)
        self._limiter = limiter_from(settings, clock, self._plans, worker)
        self._router = router_from(settings)
        self._health = HealthChecks(self._balancer, self._client)
        self._health.follow(self._router.checked)
        self._verifier = KeyVerifier(self._keys.find, clock, api_key.get_secret_value() if api_key else None)
        self._relay = Relay(
            settings.server,
            self._verifier,
            self._limiter,
            self._router,
            self._admission,
            self._client,
            self._reporter,
            self._balancer,
        )
        application = build_app(self._relay, settings.advertised_base_url)
        application.router.lifespan_context = self._lifespan
        proxies = TrustedProxies(settings.server.trusted_proxies)
        self.app = Ingress(
            application,
            data_plane(application),
            self._reporter,
            clock,
            worker,
            self._lag,
            proxies,
            self._unanswered,
        )

    def reload(self, settings: Settings) -> None:
        """Takes new settings into force, as far as `settings.reloading` lets them change.

        Nothing is taken from requests that have routed. What is known of an upstream that stays where it was (breaker,
        TTFT, connections) is kept; of one that has gone it is forgotten when its last request has ended.
        """
        router = router_from(settings)
        api_key = settings.server.api_key
        self._verifier.set_bootstrap(api_key.get_secret_value() if api_key else None)
        self._plans.replace(settings.plans, settings.keys.default_plan)
        self._relay.reload(settings.server, router)
        self._admission.resize(settings.server)
        self._router = router
        self._health.follow(router.checked)
        self._forget()

    def _forget(self) -> None:
        """Lets go of upstreams that have gone. Again and again: who routed before may ask one of them later."""
        upstreams = self._router.upstreams
        self._balancer.keep(upstreams)
        self._client.keep(upstreams)

    def _state(self, dropped: int) -> WorkerState:
        self._forget()
        return WorkerState(
            worker=self._number,
            pid=os.getpid(),
            host=host_identity(),
            inflight=self._inflight(),
            breakers={upstream.name: int(upstream.breaker.state) for upstream in self._balancer.upkeep},
            ledgers_dropped=dropped,
            queue_depth=self._admission.waiting,
            waiting=self._oldest_waiting(),
            places=self._admission.limit,
            loop_lags=self._lag.drain(),
            limits_degraded=self._limiter.degraded,
        )

    def _inflight(self) -> dict[str, int]:
        """Upstream -> requests there, those included that it still has from before it was moved or taken out."""
        found: dict[str, int] = {}
        for upstream in self._balancer.upkeep:
            found[upstream.name] = found.get(upstream.name, 0) + upstream.outstanding
        return found

    def _oldest_waiting(self) -> dict[str, int]:
        """Model -> ingress of its oldest stream that has routed and has no first token yet."""
        oldest: dict[str, int] = {}
        for ledger in self._unanswered.values():  # in the order in which they came
            if ledger.stream and ledger.routed and not ledger.first_token_written:
                oldest.setdefault(ledger.model, ledger.ingress)
        return oldest

    @asynccontextmanager
    async def _lifespan(self, _app: Any) -> AsyncIterator[None]:
        await self._limiter.open()
        tasks = [
            asyncio.create_task(self._reporter.run()),
            asyncio.create_task(self._limiter.run()),
            asyncio.create_task(self._health.run()),
            asyncio.create_task(watch_store(self._keys, self._verifier, self.clock)),
        ]
        if self._feed is not None:
            self._feed.listen(self.reload)
        self._lag.start()
        garbage.settle()
        try:
            yield
        finally:
            self._lag.stop()
            await self._client.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._limiter.close()


def run_worker(feed: Feed, *, worker: int = 0) -> None:
    """Serves the tenant port until SIGTERM or SIGINT, then drains for at most server.drain_seconds."""
    settings = feed.settings
    server = settings.server
    allow_open_files(server)
    config = uvicorn.Config(
        Worker(settings, worker, SystemClock(), feed).app,
        loop="uvloop",
        http=Protocol,
        ws="none",
        lifespan="on",
        access_log=False,
        server_header=False,
        log_config=None,
        proxy_headers=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=max(1, round(server.drain_seconds)),
        backlog=BACKLOG,
        ssl_certfile=server.tls_cert,
        ssl_keyfile=server.tls_key,
    )
    try:
        sockets = open_listeners(server)
    except OSError as error:
        where = f"{server.host}:{server.port} (server.host, server.port)"
        raise SystemExit(f"the gateway's listener on {where} could not be opened: {error}") from error
    running = uvicorn.Server(config)
    running.run(sockets=sockets)
    if not running.started:
        raise SystemExit("the gateway's worker could not start; the lines above say why")
