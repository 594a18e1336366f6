"""A mock upstream as engines are: an ASGI application served by uvicorn, as vLLM, SGLang and Tokenline's own are.

    python -m benchmarks.served --port P

It answers as `benchmarks.wire` does, reads a request's JSON and writes each event's and answer's, and computes nothing
else: what it costs is what HTTP and JSON cost an engine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn

from benchmarks.wire import ANSWER, EVENTS, event_bytes, json_bytes

_JSON = (b"content-type", b"application/json")
_STREAM = [(b"content-type", b"text/event-stream")]


async def app(
    scope: dict[str, Any], receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]
) -> None:
    """Whole, or an event for each turn of the loop; a GET (a health check) gets an empty object."""
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body", False):
            break
    request = json.loads(body or b"{}")
    if not request.get("stream"):
        answer = json_bytes(ANSWER)
        length = (b"content-length", b"%d" % len(answer))
        await send({"type": "http.response.start", "status": 200, "headers": [_JSON, length]})
        await send({"type": "http.response.body", "body": answer})
        return
    await send({"type": "http.response.start", "status": 200, "headers": _STREAM})
    for event in EVENTS:
        await send({"type": "http.response.body", "body": event_bytes(event), "more_body": True})
        await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


def main() -> None:
    """Serves until it is ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    port = parser.parse_args().port
    uvicorn.run(
        app,
        host="127.0.0.1",
        port=port,
        loop="uvloop",
        http="httptools",
        lifespan="off",
        log_level="warning",
        access_log=False,
        backlog=2048,
    )


if __name__ == "__main__":
    main()
