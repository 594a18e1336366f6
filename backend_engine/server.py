"""The engine's own process: an OpenAI-style HTTP server in front of the core, which it starts and ends.

Behind a gateway it listens on a Unix socket; alone, on `server.host` and `server.port`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket as sockets
import sys
from collections.abc import Iterator
from pathlib import Path

import uvicorn
import uvloop

from backend_engine.access import OneKey
from backend_engine.adviser import CHECK_SECONDS
from backend_engine.app import EngineApp
from backend_engine.core.messages import Shutdown
from backend_engine.core_link import ZmqLink
from backend_engine.frontend import Frontend
from backend_engine.listening import EngineError, listening
from backend_engine.metrics import EngineMetrics
from backend_engine.spans import SpanWriter, otlp_exporter
from backend_engine.supervise import CoreProcess, core_folder, inbox_of, outbox_of
from backend_engine.text.processes import ProcessText
from backend_engine.text.service import LocalText, TextService
from backend_engine.text.tokenizer import TextError
from settings.errors import SettingsError
from settings.paths import prepare_state_dir
from settings.schema import Settings
from tracing.clock import SystemClock, host_identity

log = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 300
"""Longer than any client's pool keeps a connection, so that the client is the one to close it."""
LAST_ANSWERS_SECONDS = 2.0
"""After the core's death: time to tell everybody who waits."""
LAST_WORDS_SECONDS = 0.5
LOG_RATES_SECONDS = 10.0


def run_engine(settings: Settings, *, socket: Path | None = None) -> None:
    """Runs the engine until SIGTERM or SIGINT. Exits with status 1, and a plain line on stderr, when it can't go on."""
    logging.basicConfig(
        level=settings.logging.level.upper(),
        format="%(asctime)s %(levelname)s engine %(message)s",
        stream=sys.stderr,
    )
    try:
        uvloop.run(serve(settings, socket))
    except (EngineError, SettingsError) as error:
        raise SystemExit(f"tokenline engine: {error}") from None


async def serve(settings: Settings, path: Path | None) -> None:
    """Starts everything, waits for an end, and ends everything. Raises EngineError."""
    prepare_state_dir(settings)
    clock, host = SystemClock(), host_identity()
    with listening(settings, path) as listener, core_folder(settings.run_dir) as folder:
        link = ZmqLink(inbox_of(folder), outbox_of(folder), settings.server.max_concurrent_requests)
        token = settings.server.otlp_token
        exporter = otlp_exporter(settings.otlp_endpoint, token.get_secret_value() if token is not None else None)
        spans = SpanWriter(exporter, host, settings.engine_model_name)
        text: TextService = LocalText(settings, clock)
        if settings.token_interval.detokenizer_async:
            text = ProcessText(folder, settings.server.max_concurrent_requests)
        frontend = Frontend(settings, link, text, clock, EngineMetrics(settings, clock), spans)
        key = settings.server.api_key if path is None else None
        app = EngineApp(
            frontend, host, settings.advertised_base_url, OneKey(key.get_secret_value()) if key is not None else None
        )
        core = await CoreProcess.start(settings, folder)
        try:
            await Engine(settings, frontend, link, core, _server(app, settings)).run(listener)
        finally:
            link.send(Shutdown())
            await core.end(is_loading=frontend.ready is None)
            link.close()
            spans.close()
            frontend.metrics.close()


def _server(app: EngineApp, settings: Settings) -> uvicorn.Server:
    config = uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=settings.server.drain_seconds,  # type: ignore[arg-type]  # handed to wait_for
    )
    return _Server(config)


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: they would end the process before the core has ended."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Engine:
    """Six tasks, all owned here: HTTP, the core's messages and process, text, the log of rates, and advice."""

    def __init__(
        self, settings: Settings, frontend: Frontend, link: ZmqLink, core: CoreProcess, server: uvicorn.Server
    ) -> None:
        self._settings = settings
        self._frontend = frontend
        self._link = link
        self._core = core
        self._server = server
        self._asked_to_end = asyncio.Event()

    async def run(self, listener: sockets.socket) -> None:
        """Until a signal came and the requests in flight were answered. Raises EngineError when core or model fail."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        serving = asyncio.create_task(self._server.serve([listener]), name="http")
        others = [
            asyncio.create_task(self._read_core(), name="core messages"),
            asyncio.create_task(self._watch_core(), name="core process"),
            asyncio.create_task(self._make_text(), name="text"),
            asyncio.create_task(self._log_rates(), name="rates"),
            asyncio.create_task(self._advise(), name="advice"),
        ]
        asked = asyncio.create_task(self._asked_to_end.wait(), name="signal")
        try:
            await self._until_end([serving, asked, *others])
        finally:
            self._server.should_exit = True
            if not serving.done():
                await asyncio.wait([serving])
            for task in (asked, *others):
                task.cancel()
            await asyncio.wait([asked, *others])
        await serving

    async def _until_end(self, tasks: list[asyncio.Task[None] | asyncio.Task[bool]]) -> None:
        """Returns on a signal; raises what a task raised."""
        waiting = set(tasks)
        while True:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                error = task.exception()
                if error is not None:
                    self._frontend.lose_core(str(error))
                    self._server.config.timeout_graceful_shutdown = LAST_ANSWERS_SECONDS  # type: ignore[assignment]
                    raise error
            if self._asked_to_end.is_set() or any(task.get_name() == "http" for task in done):
                return

    def _on_signal(self) -> None:
        """The first one lets running requests end (`server.drain_seconds`), the second does not."""
        if self._asked_to_end.is_set():
            self._server.force_exit = True
            self._frontend.lose_core("asked to end at once")
        self._asked_to_end.set()

    async def _read_core(self) -> None:
        async for data in self._link.messages():
            await self._frontend.read(data)

    async def _watch_core(self) -> None:
        status = await self._core.wait()
        with contextlib.suppress(TimeoutError, RuntimeError):  # its last words may still be on their way
            await asyncio.wait_for(self._frontend.core_ready(), LAST_WORDS_SECONDS)
        message = self._frontend.failure or f"the engine's core ended unexpectedly (exit status {status})"
        if not self._asked_to_end.is_set():
            raise EngineError(message)
        self._frontend.lose_core(message)

    async def _make_text(self) -> None:
        frontend = self._frontend
        try:
            await frontend.text.run(frontend.core_ready, frontend, self._say_serving)
        except (TextError, RuntimeError, ValueError, OSError) as error:
            raise EngineError(str(error)) from error

    def _say_serving(self) -> None:
        ready = self._frontend.ready
        assert ready is not None
        where = ready.device if ready.device == "simulated" else f"{ready.device} in {ready.dtype}"
        log.info("serving %s on %s", self._frontend.model, where)

    async def _log_rates(self) -> None:
        while self._settings.logging.log_tps:
            await asyncio.sleep(LOG_RATES_SECONDS)
            self._frontend.metrics.log_rates()

    async def _advise(self) -> None:
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            self._frontend.metrics.adviser.check()
