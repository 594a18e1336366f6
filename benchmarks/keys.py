"""What keys and limits cost one request: verifying a key from the cache, limits in memory, limits by Redis.

`python -m benchmarks.keys [--json]`. The limit is 5 µs for a verified key. Redis is measured where redis-server is
installed: one request at a time (its round trip is in there), and 64 at once (they share round trips).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import uvloop

from gateway.keys.credentials import presented_key
from gateway.keys.limits import Limits
from gateway.keys.plans import Plans
from gateway.keys.record import KeyRecord
from gateway.keys.secret import digest, new_secret
from gateway.keys.verify import KeyVerifier
from gateway.limits.budgets import Budgets
from gateway.limits.grant import Limiter
from gateway.limits.link import Link
from gateway.limits.local import LocalLimits
from gateway.limits.shared import SharedLimits
from tracing.clock import SystemClock

VERIFIED = 100_000
LIMITED = 30_000
SHARED = 5_000
AT_ONCE = 64
MANY = 2**50

FULL = Limits(MANY, MANY, MANY, MANY, MANY)
"""Every kind of limit, none of which is reached."""


async def microseconds(work: Callable[[], Awaitable[object]], times: int, repeats: int = 5) -> float:
    """Of one call: the best of some rounds, since others use the machine too."""
    best = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        for _ in range(times):
            await work()
        best = min(best, (time.perf_counter() - began) / times * 1e6)
    return round(best, 2)


async def measure() -> dict[str, float]:
    """µs of each."""
    clock, secret = SystemClock(), new_secret()
    record = KeyRecord("key_1", "app", digest(secret), 0, limits=FULL)
    verifier = KeyVerifier(lambda _: record, clock, bootstrap="another")
    headers = [(b"host", b"localhost"), (b"accept", b"*/*"), (b"authorization", f"Bearer {secret}".encode())]

    async def confirmed() -> None:
        await verifier.verify(secret)

    async def with_headers() -> None:
        await verifier.verify(presented_key(headers))

    verifier.confirm(clock.mono_ns() + 10**12)  # watched: nothing is looked up meanwhile
    found = {
        "verify_us": await microseconds(confirmed, VERIFIED),
        "headers_and_verify_us": await microseconds(with_headers, VERIFIED),
    }
    with tempfile.TemporaryDirectory() as folder:
        plans = Plans({})
        local = LocalLimits(plans, clock, Budgets(Path(folder) / "budgets.sqlite", clock, 1.0))
        found["local_limits_us"] = await microseconds(lambda: one_request(local, record), LIMITED)
        if shutil.which("redis-server") is not None:
            found |= await measure_redis(folder, plans, local, record)
    return found


async def measure_redis(folder: str, plans: Plans, local: LocalLimits, record: KeyRecord) -> dict[str, float]:
    """µs with a redis-server of our own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(  # noqa: ASYNC220
        ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder],
        stdout=subprocess.DEVNULL,
    )
    link = Link(f"redis://127.0.0.1:{port}/0", 5.0, "bench")
    try:
        async with asyncio.timeout(10):
            while not await link.probe():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        shared = SharedLimits(plans, SystemClock(), link, local, prefix="bench", on_outage="local")

        async def many() -> None:
            await asyncio.gather(*(one_request(shared, record, str(number)) for number in range(AT_ONCE)))

        alone = await microseconds(lambda: one_request(shared, record), SHARED, 3)
        together = await microseconds(many, SHARED // AT_ONCE, 3)
        return {"redis_limits_us": alone, "redis_limits_64_at_once_us": round(together / AT_ONCE, 2)}
    finally:
        await link.close()
        server.terminate()
        server.wait()


async def one_request(limiter: Limiter, record: KeyRecord, request_id: str = "req") -> None:
    """In, and out with 700 tokens."""
    grant = await limiter.enter(record, request_id)
    assert grant is not None
    grant.leave(700)


def main() -> None:
    """Prints the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="JSON for programs")
    as_json = parser.parse_args().json
    uvloop.install()
    found = asyncio.run(measure())
    if as_json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:32} {value:10.2f}")


if __name__ == "__main__":
    main()
