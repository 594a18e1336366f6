"""Two servers asked in turn, never at once: what one adds to the other shows through whatever else the machine does.

`python -m benchmarks.turns --ports A,B --path P --key K --seconds S` prints one JSON line: the time to the first event
of a stream of one token, of each: its median, and its P10 for machines that do other work.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time

import uvloop

from benchmarks.wire import request_bytes

PAUSE_SECONDS = 0.002
"""Between two requests: whoever books the last one has finished, and is not in the way of the next."""


class _Asker(asyncio.Protocol):
    """One connection that sends the same request again and again."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._asked = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]

    async def ask(self) -> float:
        """Seconds from the request to the first event; returns when the answer is complete."""
        self._tail = b""
        self._first = 0.0
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        began = time.perf_counter()
        self.transport.write(self._request)
        await self._done
        return self._first - began

    def data_received(self, data: bytes) -> None:
        if not self._tail and not data.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"not an answer: {data[:300]!r}")
        if not self._first and b"data: " in data:
            self._first = time.perf_counter()
        self._tail = (self._tail + data)[-64:]
        if self._tail.endswith(b"\r\n0\r\n\r\n"):
            self._done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._done.done():
            self._done.set_exception(ConnectionError("closed by the server"))


async def turns(ports: list[int], path: str, key: str, seconds: float) -> list[list[float]]:
    """The times of each server, the first tenth left out."""
    loop = asyncio.get_running_loop()
    request = request_bytes(path, key, stream=True, max_tokens=1)
    askers = [(await loop.create_connection(lambda: _Asker(request), "127.0.0.1", port))[1] for port in ports]
    times: list[list[float]] = [[] for _ in ports]
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        for asker, found in zip(askers, times, strict=True):
            found.append(await asker.ask())
            await asyncio.sleep(PAUSE_SECONDS)
    for asker in askers:
        asker.transport.abort()
    return [found[len(found) // 10 :] for found in times]


def main() -> None:
    """Asks and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ports", required=True)
    parser.add_argument("--path", required=True)
    parser.add_argument("--key", required=True)
    parser.add_argument("--seconds", type=float, default=5)
    args = parser.parse_args()
    found = uvloop.run(turns([int(port) for port in args.ports.split(",")], args.path, args.key, args.seconds))
    deciles = [[cut * 1e6 for cut in statistics.quantiles(times, n=10)] for times in found]
    result = {
        "requests": len(found[0]),
        "first_event_p50_us": [cuts[4] for cuts in deciles],
        "first_event_p10_us": [cuts[0] for cuts in deciles],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
