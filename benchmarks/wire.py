"""A mock upstream and a load client, as small as HTTP/1.1 allows: what is between them is what is measured.

`python -m benchmarks.wire upstream --port P` answers whole or with 64 tokens (one when `max_tokens` is 1);
`... load ...` prints one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import deque

import uvloop

TOKENS = 64
"""Of every answer; a stream has an event for each, one with the finish reason, one with the usage."""


def _event(**fields: object) -> dict[str, object]:
    return {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"} | fields


_WORD = _event(choices=[{"index": 0, "delta": {"content": "word "}, "finish_reason": None}])
_LAST = _event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])
_COUNTS = {"prompt_tokens": 9, "completion_tokens": TOKENS, "total_tokens": 9 + TOKENS}
EVENTS = [*[_WORD] * TOKENS, _LAST, _event(choices=[], usage=_COUNTS)]
_MESSAGE = {"role": "assistant", "content": "word " * TOKENS}
ANSWER = {
    "id": "c",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "message": _MESSAGE, "finish_reason": "stop"}],
    "usage": _COUNTS,
}


def json_bytes(value: object) -> bytes:
    """JSON without spaces."""
    return json.dumps(value, separators=(",", ":")).encode()


def event_bytes(event: object) -> bytes:
    """One server-sent event."""
    return b"data: " + json_bytes(event) + b"\n\n"


def _chunked(body: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(body), body)


_BODY = json_bytes(ANSWER)
_WHOLE_RESPONSE = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (
    len(_BODY),
    _BODY,
)
_STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_STREAM_BODY = [_chunked(event_bytes(event)) for event in EVENTS]
_STREAM_BODY[-1] = _chunked(event_bytes(EVENTS[-1]) + b"data: [DONE]\n\n") + b"0\r\n\r\n"


class _Upstream(asyncio.Protocol):
    """Answers each request on a connection in turn; a stream is one write per event, one event per loop turn."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]
        self._buffer = b""
        self._events: deque[bytes] = deque()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head_end = self._buffer.find(b"\r\n\r\n")
        if head_end < 0:
            return
        head = self._buffer[:head_end].lower()
        length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0] or 0)
        end = head_end + 4 + length
        if len(self._buffer) < end:
            return
        body = self._buffer[head_end + 4 : end]
        self._buffer = self._buffer[end:]
        if b'"stream":true' in body:
            wanted = _STREAM_BODY[-3:] if b'"max_tokens":1' in body else _STREAM_BODY
            self._events.extend([_STREAM_HEAD, *wanted])
            self._next()
        else:
            self._transport.write(_WHOLE_RESPONSE)

    def _next(self) -> None:
        if self._events and not self._transport.is_closing():
            self._transport.write(self._events.popleft())
            asyncio.get_running_loop().call_soon(self._next)


class _Client(asyncio.Protocol):
    """One connection of a closed loop: the next request leaves when the last answer is complete."""

    def __init__(self, request: bytes, stream: bool, until: float, latencies: list[float]) -> None:
        self._request = request
        self._stream = stream
        self._until = until
        self._latencies = latencies
        self.done = asyncio.get_running_loop().create_future()
        self.errors = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]
        self._send()

    def _send(self) -> None:
        self._tail = b""
        self._expected: int | None = None
        self._got = 0
        self._sent_at = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self._tail and not data.startswith(b"HTTP/1.1 200"):
            self.errors += 1
        # Of a stream only the end matters: the last chunk is the empty one.
        self._tail = (self._tail + data)[-64:] if self._stream else self._tail + data
        if not self._stream:
            self._whole()
        elif self._tail.endswith(b"\r\n0\r\n\r\n"):
            self._complete()

    def _whole(self) -> None:
        if self._expected is None:
            head_end = self._tail.find(b"\r\n\r\n")
            if head_end < 0:
                return
            head = self._tail[:head_end].lower()
            self._expected = head_end + 4 + int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
        if len(self._tail) >= self._expected:
            self._complete()

    def _complete(self) -> None:
        now = time.perf_counter()
        self._latencies.append(now - self._sent_at)
        if now < self._until:
            self._send()
        else:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)


async def _serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(_Upstream, "127.0.0.1", port, backlog=2048)
    await server.serve_forever()


def request_bytes(path: str, key: str, stream: bool, **more: object) -> bytes:
    """One chat request as it goes over the wire; `more` are fields of its body."""
    fields = {"model": "m", "messages": [{"role": "user", "content": "Say something about the sea. " * 8}]}
    body = json_bytes(fields | ({"stream": True} if stream else {}) | more)
    return (
        f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    ).encode() + body


async def load(port: int, path: str, key: str, stream: bool, connections: int, seconds: float) -> dict[str, float]:
    """A closed loop; latencies of the whole run but its first fifth."""
    loop = asyncio.get_running_loop()
    latencies: list[float] = []
    began = time.perf_counter()
    request = request_bytes(path, key, stream)
    clients = []
    for _ in range(connections):
        _, client = await loop.create_connection(
            lambda: _Client(request, stream, began + seconds, latencies), "127.0.0.1", port
        )
        clients.append(client)
    await asyncio.sleep(seconds / 5)
    skipped, mark = len(latencies), time.perf_counter()
    await asyncio.wait([client.done for client in clients], timeout=seconds + 30)
    counted = sorted(latencies[skipped:]) or [float("nan")]
    return {
        "requests": len(latencies),
        "rps": len(counted) / (time.perf_counter() - mark),
        "p50_ms": counted[len(counted) // 2] * 1e3,
        "p99_ms": counted[min(len(counted) - 1, int(len(counted) * 0.99))] * 1e3,
        "errors": sum(client.errors for client in clients),
    }


def main() -> None:
    """Runs one role."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=["upstream", "load"])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--path", default="/v1/chat/completions")
    parser.add_argument("--key", default="none")
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--connections", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3)
    args = parser.parse_args()
    if args.role == "upstream":
        uvloop.run(_serve(args.port))
    else:
        result = uvloop.run(load(args.port, args.path, args.key, args.stream, args.connections, args.seconds))
        print(json.dumps(result))


if __name__ == "__main__":
    main()
