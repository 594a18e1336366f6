"""The least that a client can do with what benchmarks.stamped writes: read it, and note when. The floor of a delay.

`python -m benchmarks.bare_reader --port P --in-flight N --seconds S` prints one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import time
from array import array

import uvloop

from benchmarks.wire import request_bytes
from loadtest.figures import quantile, rounded

_STAMP = re.compile(rb'"content":"(\d+)"')
_END = b"\r\n0\r\n\r\n"


class _Reader(asyncio.Protocol):
    """One connection that asks for stream after stream."""

    def __init__(self, request: bytes, delays_ns: array[int]) -> None:
        self._request = request
        self._delays_ns = delays_ns

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now_ns = time.perf_counter_ns()
        self._delays_ns.extend(now_ns - int(stamp) for stamp in _STAMP.findall(data))
        if data.endswith(_END):
            self.transport.write(self._request)


async def read(port: int, in_flight: int, seconds: float) -> array[int]:
    """Delays of all events but those of the first third."""
    delays_ns: array[int] = array("q")
    request = request_bytes("/v1/chat/completions", "none", stream=True, max_tokens=64)
    loop = asyncio.get_running_loop()
    readers = [
        (await loop.create_connection(lambda: _Reader(request, delays_ns), "127.0.0.1", port))[1]
        for _ in range(in_flight)
    ]
    await asyncio.sleep(seconds / 3)
    del delays_ns[:]
    await asyncio.sleep(seconds * 2 / 3)
    for reader in readers:
        reader.transport.abort()
    return delays_ns


def main() -> None:
    """Reads and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--in-flight", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    args = parser.parse_args()
    delays_ms = sorted(ns / 1e6 for ns in uvloop.run(read(args.port, args.in_flight, args.seconds)))
    shares = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))
    added = {name: rounded(quantile(delays_ms, share)) for name, share in shares}
    print(json.dumps({"added_ms": added, "events": len(delays_ms)}))


if __name__ == "__main__":
    main()
