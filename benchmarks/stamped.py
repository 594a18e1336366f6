"""A mock upstream that writes into each event when it wrote it: what a client adds to that is the client's own.

`python -m benchmarks.stamped --port P --events N --period-ms T [--together]`: every stream has N events, one each T ms,
each stream at an instant of its own, or all together. Events of one stream never share a write.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import time

import uvloop

from loadtest.limits import raise_open_files

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_BEFORE = (
    b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m",'
    b'"choices":[{"index":0,"delta":{"content":"'
)
_AFTER = b'"},"finish_reason":null}]}\n\n'
_LAST = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
_NOT_HERE = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"


def _chunked(body: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(body), body)


class _Upstream(asyncio.Protocol):
    """One connection: a stream for each POST to chat completions, 404 for the rest."""

    def __init__(self, events: int, period_s: float, *, together: bool) -> None:
        self._events = events
        self._period_s = period_s
        self._together = together
        self._buffer = b""
        self._left = 0
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]
        self._socket: int = transport.get_extra_info("socket").fileno()
        self._loop = asyncio.get_running_loop()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, found, body = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return
        length = next(
            (int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0
        )
        if len(body) < length:
            return
        self._buffer = body[length:]
        if b"/chat/completions" not in head.split(b"\r\n", 1)[0]:
            self._transport.write(_NOT_HERE)
            return
        self._transport.write(_HEAD)
        self._left = self._events
        now = self._loop.time()
        # Streams that are asked for at once must not tick at once, unless that is wanted.
        phase = random.uniform(0.5, 1.5) * self._period_s
        self._due = (now // self._period_s + 1) * self._period_s if self._together else now + phase
        self._timer = self._loop.call_at(self._due, self._tick)

    def _tick(self) -> None:
        # Straight to the socket: the loop would write at the end of its turn, which is not when the stamp says.
        os.write(self._socket, _chunked(_BEFORE + str(time.perf_counter_ns()).encode() + _AFTER))
        self._left -= 1
        if not self._left:
            self._transport.write(_chunked(_LAST) + b"0\r\n\r\n")
            return
        self._due += self._period_s
        self._timer = self._loop.call_at(self._due, self._tick)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()


async def _serve(args: argparse.Namespace) -> None:
    def protocol() -> _Upstream:
        return _Upstream(args.events, args.period_ms / 1000, together=args.together)

    server = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", args.port, backlog=4096)
    await server.serve_forever()


def main() -> None:
    """Serves until it is ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--events", type=int, required=True)
    parser.add_argument("--period-ms", type=float, required=True)
    parser.add_argument("--together", action="store_true")
    args = parser.parse_args()
    raise_open_files(2**20)  # as many as this process may have
    uvloop.run(_serve(args))


if __name__ == "__main__":
    main()
