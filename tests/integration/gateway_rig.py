"""A relay worker on a real port between a scripted upstream and a fake observer."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import uvicorn
from aiohttp import web

from gateway.client_protocol import Protocol
from gateway.worker import Worker
from settings import Settings
from settings.schema import EngineSettings, RouteSettings, ServerSettings, TargetSettings, UpstreamSettings
from tracing.clock import SystemClock
from tracing.ledger import Closed, FirstToken, Ledger, Record
from tracing.wire import FrameReader

KEY = "test-key"
Script = Callable[[web.Request], Awaitable[web.StreamResponse]]


def chunk(content: str | None = None, finish: str | None = None, **more: object) -> bytes:
    """One chat chunk as an SSE event."""
    delta = {} if content is None else {"content": content}
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return event({"id": "c", "object": "chat.completion.chunk", "choices": [choice], **more})


def event(data: object) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


USAGE = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
ANSWER = {
    "id": "c",
    "object": "chat.completion",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}],
    "usage": USAGE,
}
USAGE_EVENT = event({"id": "c", "object": "chat.completion.chunk", "choices": [], "usage": USAGE})
DONE = b"data: [DONE]\n\n"


def stream(*pieces: bytes | float) -> Script:
    """An upstream that sends these bytes, each on its own; a number is a pause in seconds."""

    async def script(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for piece in pieces:
            if isinstance(piece, bytes):
                await response.write(piece)
            else:
                await asyncio.sleep(piece)
        return response

    return script


def whole(body: object, status: int = 200, **headers: str) -> Script:
    """An upstream that sends one JSON body."""

    async def script(request: web.Request) -> web.StreamResponse:
        return web.json_response(body, status=status, headers=headers)

    return script


class Upstream:
    """A server whose answer each test scripts; remembers what it was asked."""

    def __init__(self) -> None:
        self.script: Script = whole({})
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        """With their query strings."""
        self.cancelled = asyncio.Event()
        self.asked = asyncio.Event()
        self.url = ""
        self.checks = 0
        """Health checks so far."""
        self.is_frozen = False

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if request.method == "GET":
            self.checks += 1
            if self.is_frozen:
                await asyncio.sleep(60)
            return web.json_response({"data": []})
        self.bodies.append(await request.read())
        self.paths.append(request.path_qs)
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        self.asked.set()
        try:
            return await self.script(request)
        except (asyncio.CancelledError, ConnectionResetError):
            self.cancelled.set()
            raise

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        try:
            yield
        finally:
            await runner.cleanup()


class Observer:
    """Takes the worker's records."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self._changed = asyncio.Event()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frames = FrameReader()
        while data := await reader.read(65536):
            for records in frames.feed(data):
                self.records += records
                self._changed.set()
        writer.close()

    @asynccontextmanager
    async def listening(self, path: Path) -> AsyncIterator[None]:
        server = await asyncio.start_unix_server(self._connection, path)
        try:
            yield
        finally:
            server.close()

    async def closed(self, count: int = 1) -> list[Ledger]:
        """The first `count` ledgers, as soon as they are there."""
        async with asyncio.timeout(5):
            while len(found := [r.ledger for r in self.records if isinstance(r, Closed)]) < count:
                self._changed.clear()
                await self._changed.wait()
        return found

    def first_tokens(self) -> list[FirstToken]:
        return [record for record in self.records if isinstance(record, FirstToken)]


class Rig:
    """The worker, the upstreams by name, the observer, and a client with the right key."""

    def __init__(self, settings: Settings, upstreams: dict[str, Upstream], port: int) -> None:
        self.settings = settings
        self.upstream = upstreams["a"]
        self.upstreams = upstreams
        self.observer = Observer()
        self.worker = Worker(settings, 0, SystemClock())
        self.server: uvicorn.Server
        self.serving: asyncio.Task[None]
        self.origin = f"http://127.0.0.1:{port}"
        self.client = httpx.AsyncClient(base_url=self.origin, headers={"authorization": f"Bearer {KEY}"}, timeout=10)

    async def chat(self, **fields: object) -> httpx.Response:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
        return await self.client.post("/api/v1/chat/completions", json=body)

    async def stop(self) -> None:
        """Ends the worker as SIGTERM does: a second of drain."""
        self.server.should_exit = True
        await self.serving

    async def ledger(self) -> Ledger:
        return (await self.observer.closed())[0]


@asynccontextmanager
async def rig(
    tmp_path: Path,
    *,
    names: tuple[str, ...] = ("a",),
    server: dict[str, object] | None = None,
    dead: tuple[str, ...] = (),
    spoken: dict[str, object] | None = None,
    health_path: str = "",
    affinity: str = "none",
    more: dict[str, object] | None = None,
) -> AsyncIterator[Rig]:
    """A running rig. Model `m` goes to every upstream in turn, model `alias` to `real-name` at the first.

    No health checks unless a path is given: an upstream remembers all that it is asked.
    """
    upstreams = {name: Upstream() for name in names}
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    unused = socket.socket()
    unused.bind(("127.0.0.1", 0))
    dead_url = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
    for upstream in upstreams.values():
        context = upstream.serving()
        await context.__aenter__()
        upstream.context = context  # type: ignore[attr-defined]
    settings = Settings(
        state_dir=tmp_path,
        **(more or {}),
        server=ServerSettings(port=port, api_key=KEY, **(server or {})),
        engine=EngineSettings(backend="none"),
        upstreams=tuple(
            [UpstreamSettings(name=name, url=dead_url, health_path=health_path) for name in dead]
            + [
                UpstreamSettings(name=name, url=upstream.url, **(spoken or {}), health_path=health_path)
                for name, upstream in upstreams.items()
            ]
        ),
        models=(
            RouteSettings(
                name="m", affinity=affinity, targets=tuple(TargetSettings(upstream=name) for name in (*dead, *names))
            ),
            RouteSettings(name="alias", targets=(TargetSettings(upstream=names[0], model="real-name"),)),
        ),
    )
    settings.run_dir.mkdir(parents=True)
    found = Rig(settings, upstreams, port)
    server_task = uvicorn.Server(
        uvicorn.Config(
            found.worker.app, http=Protocol, lifespan="on", access_log=False, log_level="error",
            timeout_graceful_shutdown=1, ssl_certfile=settings.server.tls_cert, ssl_keyfile=settings.server.tls_key,
        )
    )  # fmt: skip
    async with found.observer.listening(settings.intake_socket), found.client:
        found.server = server_task
        found.serving = asyncio.create_task(server_task.serve(sockets=[listener]))
        while not server_task.started:
            await asyncio.sleep(0.01)
        try:
            yield found
        finally:
            await found.stop()
            for upstream in upstreams.values():
                await upstream.context.__aexit__(None, None, None)  # type: ignore[attr-defined]
            unused.close()
