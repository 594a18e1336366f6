"""Clients of streams that stay open: they read the moment that benchmarks.stamped writes into each event.

`python -m benchmarks.open_clients --port P --streams N ...` opens N streams, holds them and prints one JSON line: how
long events were under way, by one machine's monotonic clock.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import time

import uvloop

from benchmarks.wire import request_bytes
from loadtest.limits import raise_open_files

OPENING_PER_SECOND = 400

_STAMP = re.compile(rb'"content":"(\d+)"')


class _Client(asyncio.Protocol):
    """One open stream; every event that it reads is a sample."""

    def __init__(self, request: bytes, tally: Tally) -> None:
        self._request = request
        self._tally = tally
        self._has_begun = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter_ns()
        if not self._has_begun:
            self._has_begun = True
            self._tally.begun += data.startswith(b"HTTP/1.1 200")
        for stamp in _STAMP.findall(data):
            self._tally.take(now - int(stamp))

    def connection_lost(self, exc: Exception | None) -> None:
        self._tally.lost += not self._tally.is_over

    def leave(self) -> None:
        self._transport.close()


class Tally:
    """What the clients saw."""

    def __init__(self) -> None:
        self.begun = self.lost = 0
        self.is_counting = self.is_over = False
        self.delays_ns: list[int] = []

    def take(self, delay_ns: int) -> None:
        """An event was under way that long."""
        if self.is_counting:
            self.delays_ns.append(delay_ns)

    def result(self) -> dict[str, float]:
        """Figures in ms, events, streams that began and that were lost."""
        delays = sorted(self.delays_ns) or [-1]

        def quantile(share: float) -> float:
            return round(delays[min(len(delays) - 1, int(len(delays) * share))] / 1e6, 3)

        figures = {"p50_ms": quantile(0.5), "p99_ms": quantile(0.99), "p999_ms": quantile(0.999), "max_ms": quantile(1)}
        return {**figures, "events": len(self.delays_ns), "streams": self.begun, "lost": self.lost}


async def hold(port: int, path: str, key: str, streams: int, seconds: float, interval: float) -> dict[str, float]:
    """Opens the streams, waits until all have had events, counts for so long, and leaves."""
    loop, tally = asyncio.get_running_loop(), Tally()
    request = request_bytes(path, key, True)
    clients = []
    began = loop.time()
    for number in range(streams):
        _, client = await loop.create_connection(lambda: _Client(request, tally), "127.0.0.1", port)
        clients.append(client)
        await asyncio.sleep(max(0.0, began + number / OPENING_PER_SECOND - loop.time()))
    await asyncio.sleep(2 * interval)
    tally.is_counting = True
    await asyncio.sleep(seconds)
    tally.is_counting, tally.is_over = False, True
    for client in clients:
        client.leave()
    await asyncio.sleep(0.1)
    return tally.result()


def main() -> None:
    """Opens, holds, prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--path", default="/v1/chat/completions")
    parser.add_argument("--key", default="none")
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--interval", type=float, default=2)
    args = parser.parse_args()
    if (told := raise_open_files(args.streams)) is not None:
        raise SystemExit(told)
    plan = (args.streams, args.seconds, args.interval)
    print(json.dumps(uvloop.run(hold(args.port, args.path, args.key, *plan))))


if __name__ == "__main__":
    main()
