"""The observer process: opens everything, serves until SIGTERM or SIGINT, and closes everything in order."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
from collections.abc import AsyncIterator, Generator, Sequence

import uvicorn
import uvloop
from fastapi import APIRouter
from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from settings.feed import Feed
from settings.schema import Settings
from tracing import garbage
from tracing.clock import SystemClock
from tracing.observer.access_log import AccessLog
from tracing.observer.app import Pages, ops_app
from tracing.observer.baseline_file import SAVE_SECONDS
from tracing.observer.core import Observer
from tracing.observer.export import Exporter, ExportError, exporter_from_environment
from tracing.observer.health import Health, probes_of
from tracing.observer.intake import Intake, SocketInUseError
from tracing.observer.receiver import Receiver
from tracing.observer.reloads import Reloads, reload_router
from tracing.observer.schema import StoreError
from tracing.observer.scrape import MetricsPage
from tracing.observer.usage import FLUSH_SECONDS as USAGE_SECONDS

TICK_SECONDS = 0.1
FLUSH_SECONDS = 0.3
GRACE_SECONDS = 3

log = logging.getLogger("tokenline.observer")


class PortInUseError(RuntimeError):
    """A listener cannot be opened; the message names the port and its setting."""


def run_observer(
    feed: Feed, *, admin_key_hash: bytes, routers: Sequence[APIRouter] = (), pages: Pages | None = None
) -> None:
    """Runs until SIGTERM or SIGINT. Leaves by SystemExit with a message when it cannot start.

    `admin_key_hash` is the SHA-256 of the admin key; `routers` are served under /admin/v1, behind that key; `pages`
    makes routes that guard themselves.
    """
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(feed, admin_key_hash, routers, pages))
    except (PortInUseError, SocketInUseError, StoreError, ExportError) as error:
        raise SystemExit(f"tokenline observer: {error}") from error


async def _serve(feed: Feed, admin_key_hash: bytes, routers: Sequence[APIRouter], pages: Pages | None) -> None:
    settings = feed.settings
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    server = settings.server
    with (
        _bound(server.ops_host, server.ops_port, "server.ops_port") as ops_socket,
        _bound(server.otlp_host, server.otlp_port, "server.otlp_port") as otlp_socket,
    ):
        exporter = exporter_from_environment(settings)
        registry = CollectorRegistry()
        clock = SystemClock()
        observer = Observer(settings, clock, registry, exporter)
        health = Health(probes_of(settings), observer.upstream_health)
        reloads = Reloads(feed.answer, lambda is_ok: observer.meters.reloaded(is_ok, clock.wall_ns()))

        def reload(new: Settings) -> None:
            observer.reload(new)
            health.follow(probes_of(new))

        app = ops_app(
            observer,
            MetricsPage(registry, settings.engine_unix_socket, settings.engine_origin),
            admin_key_hash=admin_key_hash,
            routers=(*routers, reload_router(reloads)),
            pages=pages,
        )
        if exporter is not None:
            _trace_ops(app, exporter)
        async with _opened(observer, exporter), _intake(settings, observer), _background(observer, health):
            feed.listen(reload, reloads.told)
            token = server.otlp_token
            receiver = Receiver(
                observer.take_spans,
                observer.meters.spans_received,
                observer.meters.timing_anomaly,
                token=token.get_secret_value() if token is not None else None,
            ).app()
            async with _listening(app, ops_socket, settings), _listening(receiver, otlp_socket, settings):
                garbage.settle()
                log.info("observer ready: ops port %d, OTLP port %d", server.ops_port, server.otlp_port)
                await stop.wait()


def _trace_ops(app: ASGIApp, exporter: Exporter) -> None:
    FastAPIInstrumentor.instrument_app(
        app,  # type: ignore[arg-type]
        tracer_provider=exporter.provider,
        excluded_urls="/metrics$,/healthz$,/readyz$",
        exclude_spans=["receive", "send"],
    )


@contextlib.contextmanager
def _bound(host: str, port: int, setting: str) -> Generator[socket.socket, None, None]:
    """A listening socket. Raises PortInUseError that names the setting."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(256)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PortInUseError(
                    f"port {port} of {host} is in use ({setting} = {port}); end what uses it, or set another {setting}"
                ) from error
            raise PortInUseError(f"{setting} = {port} on host {host!r} cannot be listened on: {error}") from error
        listener.setblocking(False)
        yield listener


@contextlib.asynccontextmanager
async def _opened(observer: Observer, exporter: Exporter | None) -> AsyncIterator[None]:
    """The store, and behind it the export: at the end waits are ended, rows written and spans sent."""
    observer.store.open()
    observer.baseline_file.load()
    try:
        yield
    finally:
        observer.join.finish()
        await asyncio.to_thread(observer.baseline_file.save)
        await asyncio.to_thread(observer.store.close)
        await asyncio.to_thread(observer.usage.flush)
        if exporter is not None:
            await asyncio.to_thread(exporter.close)
        if observer.access_log is not None:
            await asyncio.to_thread(observer.access_log.flush)


@contextlib.asynccontextmanager
async def _intake(settings: Settings, observer: Observer) -> AsyncIterator[None]:
    intake = Intake(settings.intake_socket, observer.take_records)
    await intake.open()
    try:
        yield
    finally:
        await intake.close()


@contextlib.asynccontextmanager
async def _background(observer: Observer, health: Health) -> AsyncIterator[None]:
    """Health checks, the tick and the access log, while the block runs; the error of one ends the process."""

    async def tick() -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            observer.tick()

    async def flush(log: AccessLog) -> None:
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            await asyncio.to_thread(log.flush)

    async def save_baselines() -> None:
        while True:
            await asyncio.sleep(SAVE_SECONDS)
            await asyncio.to_thread(observer.baseline_file.save)

    async def save_usage() -> None:
        while True:
            await asyncio.sleep(USAGE_SECONDS)
            await asyncio.to_thread(observer.usage.flush)

    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(tick(), name="tick"),
            group.create_task(save_usage(), name="usage"),
            group.create_task(save_baselines(), name="baselines"),
            group.create_task(health.run(), name="health"),
        ]
        if observer.access_log is not None:
            tasks.append(group.create_task(flush(observer.access_log), name="access log"))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()


class _Server(uvicorn.Server):
    """A uvicorn server that leaves the signals to the process, which has two of them."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


@contextlib.asynccontextmanager
async def _listening(app: ASGIApp, listener: socket.socket, settings: Settings) -> AsyncIterator[None]:
    """Serves `app` on the socket until the block ends, then lets running answers end."""
    server = _Server(
        uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="off",
            access_log=False,
            server_header=False,
            log_config=None,
            log_level="warning" if settings.logging.level == "info" else settings.logging.level,
            proxy_headers=False,
            timeout_graceful_shutdown=GRACE_SECONDS,
        )
    )
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(server.serve(sockets=[listener]), name="listener")
        try:
            yield
        finally:
            server.should_exit = True
            await asyncio.wait([serving])
