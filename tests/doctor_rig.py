"""A server that answers as each test scripts, and the doctor sent to it."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web

from loadtest.doctor.examination import examine
from loadtest.doctor.finding import Finding, Report
from loadtest.doctor.given import given_by
from tracing.clock import SystemClock

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
KEY = "sk-tl-doctors-key-1234567890"
WHOLE = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}]}
GAP_S = 0.008


def chunk(text: str | None, finish: str | None = None, **more: Any) -> bytes:
    delta = {} if text is None else {"content": text}
    return event({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}], **more})


def event(data: object) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


async def send(request: web.Request, *pieces: bytes | float, **headers: str) -> web.StreamResponse:
    """An event stream of these pieces; a number is a pause in seconds."""
    response = web.StreamResponse(headers={"content-type": "text/event-stream", **headers})
    await response.prepare(request)
    for piece in pieces:
        if isinstance(piece, bytes):
            await response.write(piece)
        else:
            await asyncio.sleep(piece)
    return response


def counted(tokens: int, gap_s: float = GAP_S) -> list[bytes | float]:
    """That many tokens with a pause before each."""
    pieces: list[bytes | float] = []
    for number in range(tokens):
        pieces += [gap_s, chunk(f"{number} ")]
    return [*pieces, chunk(None, "length"), DONE]


QUICK = counted(10, 0.001)


def page(status: int = 200, title: str = "Log in") -> Handler:
    async def handle(_request: web.Request) -> web.StreamResponse:
        return web.Response(status=status, text=f"<html><title>{title}</title></html>", content_type="text/html")

    return handle


def said(body: object, status: int = 200, **headers: str) -> Handler:
    async def handle(_request: web.Request) -> web.StreamResponse:
        return web.json_response(body, status=status, headers=headers)

    return handle


def refusal(status: int, message: str, code: str = "", **headers: str) -> Handler:
    return said({"error": {"message": message, "code": code}}, status, **headers)


def streamed(*pieces: bytes | float, **headers: str) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        return await send(request, *pieces, **headers)

    return handle


async def never(_request: web.Request) -> web.StreamResponse:
    await asyncio.sleep(60)
    raise AssertionError


async def cut(request: web.Request) -> web.StreamResponse:
    response = await send(request, chunk("a"), chunk("b"))
    request.transport.abort()
    return response


async def plain_text(_request: web.Request) -> web.StreamResponse:
    return web.Response(text="hello")


class Server:
    """Serves models below `prefix`, and chat. What a test sets replaces one of them."""

    def __init__(self) -> None:
        self.prefix = "/v1"
        self.models: Handler = self.list_models
        self.whole: Handler = self.answer_whole
        self.stream: Handler = self.answer_stream
        self.elsewhere: Handler = self.not_found
        self.keys: list[str] = []
        """Every credential that was shown to it."""
        self.asked: list[str] = []
        self.limits: list[int] = []
        """`max_tokens` of the streams."""
        self.origin = ""

    async def list_models(self, _request: web.Request) -> web.StreamResponse:
        return web.json_response({"object": "list", "data": [{"id": "m"}]})

    async def answer_whole(self, _request: web.Request) -> web.StreamResponse:
        return web.json_response(WHOLE)

    async def answer_stream(self, request: web.Request) -> web.StreamResponse:
        return await send(request, *counted((await request.json())["max_tokens"]))

    async def not_found(self, _request: web.Request) -> web.StreamResponse:
        return web.Response(status=404, text="404 page not found")

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.keys += [request.headers[name] for name in ("authorization", "x-api-key") if name in request.headers]
        self.asked.append(f"{request.method} {request.path}")
        if request.path == f"{self.prefix}/models":
            return await self.models(request)
        if request.path in (f"{self.prefix}/chat/completions", f"{self.prefix}/messages"):
            fields = await request.json()
            if not fields["stream"]:
                return await self.whole(request)
            self.limits.append(fields.get("max_tokens", 0))
            return await self.stream(request)
        return await self.elsewhere(request)

    @asynccontextmanager
    async def serving(self, context: ssl.SSLContext | None = None) -> AsyncIterator[Server]:
        async with listening(self.handle, context) as self.origin:
            yield self


@asynccontextmanager
async def listening(handle: Handler, context: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """Takes every request, also one for a proxy; gives the origin."""
    runner = web.ServerRunner(web.Server(handle), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    try:
        yield f"{'https' if context else 'http'}://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def buffering(request: web.BaseRequest) -> web.StreamResponse:
    """A forward proxy that hands an answer on when it has all of it."""
    async with (
        aiohttp.ClientSession() as session,
        session.request(
            request.method, request.url, data=await request.read(), headers=_end_to_end(request.headers)
        ) as answer,
    ):
        body = await answer.read()
        return web.Response(status=answer.status, body=body, headers=_end_to_end(answer.headers) | {"via": "1.1 squid"})


def in_front_of(origin: str) -> Handler:
    """A reverse proxy that hands an answer on when it has all of it."""

    async def handle(request: web.Request) -> web.StreamResponse:
        async with (
            aiohttp.ClientSession() as session,
            session.request(
                request.method, origin + request.path, data=await request.read(), headers=_end_to_end(request.headers)
            ) as answer,
        ):
            headers = _end_to_end(answer.headers) | {"server": "nginx"}
            return web.Response(status=answer.status, body=await answer.read(), headers=headers)

    return handle


def _end_to_end(headers: Any) -> dict[str, str]:
    dropped = {"transfer-encoding", "content-length", "connection", "host", "proxy-connection", "server", "date"}
    return {name: value for name, value in headers.items() if name.lower() not in dropped}


class Seen:
    """A report, by check."""

    def __init__(self, report: Report) -> None:
        self.report = report

    def codes(self, check: str) -> list[str]:
        return [finding.code for finding in self.report.findings if finding.check == check]

    def __getitem__(self, code: str) -> Finding:
        return next(finding for finding in self.report.findings if finding.code == code)

    @property
    def troubles(self) -> list[str]:
        return [finding.code for finding in self.report.troubles]


async def doctor(
    base_url: str,
    *,
    key: str = KEY,
    surface: str = "openai",
    model: str | None = None,
    timeout_s: float = 20,
    **environ: str,
) -> Seen:
    """The doctor's report of this base_url, in an environment with nothing else than what is given.

    A doctor who says that the machine was too busy to measure is asked again, twice at most.
    """
    variables = {"THE_KEY": key, **environ}
    given = given_by(surface, base_url, "THE_KEY", model, variables)
    for _ in range(3):
        report = await examine(given, SystemClock(), timeout_seconds=timeout_s, progress=lambda _check: None)
        if not any(finding.code == "spacing_busy" for finding in report.findings):
            break
    assert all(len(key) < 8 or key not in repr(finding) for finding in report.findings)
    return Seen(report)
