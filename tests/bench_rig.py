"""An endpoint that misbehaves as each test asks, and a load test against it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from loadtest.run import run_load
from loadtest.session import Asked
from loadtest.settings import bench_settings
from loadtest.stages import stage_of
from tracing.clock import SystemClock

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def event(text: str | None = None, *, finish: str | None = None, **more: Any) -> bytes:
    """One event of a chat stream."""
    delta = {} if text is None else {"content": text}
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice], **more}).encode() + b"\n\n"


def usage(prompt: int, output: int) -> bytes:
    shown = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
    return b"data: " + json.dumps({"choices": [], "usage": shown}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


async def streamed(request: web.Request, *pieces: bytes | float, content_type: str = "text/event-stream"):
    """Writes the pieces; a number is a pause in seconds."""
    response = web.StreamResponse(headers={"content-type": content_type})
    await response.prepare(request)
    for piece in pieces:
        if isinstance(piece, bytes):
            await response.write(piece)
        else:
            await asyncio.sleep(piece)
    return response


@asynccontextmanager
async def endpoint(
    chat: Handler,
    models: tuple[str, ...] = ("m",),
    pages: dict[str, str] | None = None,
    *,
    counts_words: bool = False,
) -> AsyncIterator[str]:
    """Serves `chat`, and a /tokenize whose tokens are words where it is wanted; gives the base_url."""

    async def list_models(_request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": name} for name in models]})

    async def page(request: web.Request) -> web.Response:
        return web.Response(text=(pages or {})[request.path])

    async def tokenize(request: web.Request) -> web.Response:
        body = await request.json()
        text = body["prompt"] if "prompt" in body else "<user> " + body["messages"][0]["content"]
        return web.json_response({"count": len(text.split())})

    app = web.Application()
    if counts_words:
        app.router.add_post("/tokenize", tokenize)
    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_get("/v1/models", list_models)
    for path in pages or {}:
        app.router.add_get(path, page)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


async def load(base_url: str, *, stopped: Callable[[], bool] = lambda: False, **given: Any) -> dict[str, Any]:
    """A short load test: `section__key=value` sets what is not the default."""
    table: dict[str, dict[str, Any]] = {
        "api": {"base_url": base_url, "api_key_env": None, "timeout_seconds": 5, "max_retries": 0},
        "load_test": {"concurrency": 2, "duration_seconds": 0.15},
        "workload": {"prompt_tokens": 64, "max_output_tokens": 4},
        "metrics": {"sample_interval_ms": 50, "collect_gpu_util": False},
    }
    for name, value in given.items():
        section, _, key = name.partition("__")
        table[section][key] = value
    settings = bench_settings(table, "test")
    stages = (stage_of(settings.load_test),)
    return await run_load(
        Asked(settings), stages, SystemClock(), is_stopped=stopped, tell=lambda _driver, _progress: None
    )


def kinds(run: dict[str, Any], what: str = "error") -> dict[str, dict[str, Any]]:
    """What a run explains, by kind."""
    return {entry["kind"]: entry for entry in run["explained"] if entry["what"] == what}
