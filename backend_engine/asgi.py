"""What the data plane needs of HTTP: reading a body up to a limit, noticing that a client left, writing an answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

from protocol import headers as names
from protocol.errors import ApiError
from protocol.ids import accepted_client_id, accepted_gateway_id, new_request_id

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Header = tuple[bytes, bytes]

LINGER_SECONDS = 2.0
LINGER_BYTES = 256 * 2**20

JSON: Header = (b"content-type", b"application/json")
EVENT_STREAM: tuple[Header, ...] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class ClientLeft(Exception):
    """The client closed the connection before its request was complete."""


def header(scope: Scope, name: str) -> str | None:
    """A request header's value, the first if it came more than once."""
    wanted = name.encode()
    for key, value in scope["headers"]:
        if key == wanted:
            return bytes(value).decode("latin-1")
    return None


def gateway_id_of(scope: Scope) -> str | None:
    """The gateway's id of the request; None when it came by another way."""
    sent = header(scope, names.TOKENLINE_REQUEST_ID)
    return accepted_gateway_id(sent) if sent else None


def request_id_of(scope: Scope) -> str:
    """The gateway's id, so that an answer names what the gateway knows; else the client's own if it is harmless, else
    a new one."""
    sent = header(scope, names.REQUEST_ID)
    return gateway_id_of(scope) or (accepted_client_id(sent) if sent else None) or new_request_id()


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The body. Raises ApiError 413 as soon as it is known to be over `limit` bytes, ClientLeft when it ends early."""
    declared = header(scope, "content-length")
    if declared is not None and declared.isdecimal() and int(declared) > limit:
        raise too_large(limit, f"has {declared} bytes")
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise too_large(limit, f"has more than {limit} bytes")
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


def too_large(limit: int, seen: str) -> ApiError:
    """413; `seen` says how large the body is."""
    return ApiError(
        413, "body_too_large", f"The request body {seen}; the limit is {limit} bytes (server.max_body_bytes)."
    )


@asynccontextmanager
async def noticing_disconnect(receive: Receive, left: Callable[[], None]) -> AsyncIterator[None]:
    """Calls `left` when the client closes the connection while the block runs. For after the body was read."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        left()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
        await asyncio.wait([watcher])


async def send_json(send: Send, status: int, body: bytes, headers: tuple[Header, ...] | list[Header] = ()) -> None:
    """A whole answer."""
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [JSON, length, *headers]})
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, receive: Receive, error: ApiError, request_id: str) -> None:
    """An error in OpenAI's shape."""
    body = error.openai_body(request_id)
    headers = [*error.headers(), (names.REQUEST_ID.encode(), request_id.encode())]
    if error.status != 413:
        await send_json(send, error.status, body, headers)
        return
    # The client is still writing. Closing at once would reset the connection under the answer before it is read, so
    # what still comes is thrown away for a while (as nginx's lingering_close does), then the connection is closed.
    length = (b"content-length", str(len(body)).encode())
    headers = [JSON, length, (b"connection", b"close"), *headers]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": True})
    await _discard(receive)
    await send({"type": "http.response.body", "body": b""})


async def _discard(receive: Receive) -> None:
    thrown_away = 0
    try:
        async with asyncio.timeout(LINGER_SECONDS):
            while thrown_away < LINGER_BYTES:
                message = await receive()
                thrown_away += len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
    except TimeoutError:
        return
