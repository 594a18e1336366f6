"""A real relay worker between a real client and scripted upstreams, all on one clock and one event loop.

Its records go to the observer's core as they would through the socket, engine spans as they would through OTLP. The
core's own clock is a fake one: waits of the join end when a test says so.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import uvicorn
from prometheus_client import CollectorRegistry

from gateway.client_protocol import Protocol
from gateway.worker import Worker
from loadtest.conformance.client import Answer, Client
from loadtest.scripted.stage import Stage
from loadtest.scripted.upstream import ScriptedUpstream
from settings import Settings
from tracing.clock import FakeClock, SystemClock
from tracing.ledger import Closed, FirstToken, Ledger, Record
from tracing.observer.core import Observer
from tracing.observer.join import SETTLE_NS
from tracing.observer.otlp import from_protobuf
from tracing.observer.rows import Row
from tracing.observer.view import trace_of
from tracing.spans import Span
from tracing.wire import FrameReader

KEY = "conformance-key"
MODEL = "m"


class Bench:
    """Everything that a case needs."""

    def __init__(self, settings: Settings, stage: Stage, client: Client) -> None:
        self.settings = settings
        self.stage = stage
        self.client = client
        self.worker = Worker(settings, 0, SystemClock())
        self.records: list[Record] = []
        self.registry = CollectorRegistry()
        self.observer_clock = FakeClock(time.perf_counter_ns(), time.time_ns())
        self.observer = Observer(settings, self.observer_clock, self.registry, None)
        self.spans_taken = 0
        self.spans_may_come = asyncio.Event()
        self.spans_may_come.set()
        self._changed = asyncio.Event()

    async def take_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """The intake socket's other end."""
        frames = FrameReader()
        while data := await reader.read(65536):
            for records in frames.feed(data):
                self.records += records
                self.observer.take_records(records)
                self._changed.set()
        writer.close()

    async def take_spans(self, body: bytes) -> None:
        """What the receiver does with a body."""
        await self.spans_may_come.wait()
        spans = from_protobuf(body).spans
        self.observer.take_spans(spans)
        self.spans_taken += len(spans)
        self._changed.set()

    async def until(self, true: Any, what: str) -> None:
        """Waits for a condition that records or spans bring about."""
        try:
            async with asyncio.timeout(20):
                while not true():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise AssertionError(f"{what}: not within 20 s") from None

    def ledgers(self) -> list[Ledger]:
        return [record.ledger for record in self.records if isinstance(record, Closed)]

    def first_tokens(self, ledger: Ledger) -> list[FirstToken]:
        return [r for r in self.records if isinstance(r, FirstToken) and r.request_id == ledger.request_id]

    async def ledger(self, count: int = 1) -> Ledger:
        """The ledger of the request that ended as the `count`th."""
        await self.until(lambda: len(self.ledgers()) >= count, f"{count} ledgers")
        return self.ledgers()[count - 1]

    async def ledger_of(self, answer: Answer) -> Ledger:
        """The ledger of the request that was answered so."""
        request_id = answer.headers["x-tokenline-request-id"]
        await self.until(lambda: any(x.request_id == request_id for x in self.ledgers()), f"a ledger of {request_id}")
        return next(x for x in self.ledgers() if x.request_id == request_id)

    async def take_all_spans(self, count: int) -> None:
        """Waits for engine spans, and until the join looks for no more of them."""
        await self.until(lambda: self.spans_taken >= count, f"{count} spans")
        self.observer_clock.advance_ms(SETTLE_NS / 1e6 + 1)
        self.observer.tick()

    def end_waits(self) -> None:
        """The join's wait passes: stages are known as well as they ever will be."""
        self.observer_clock.advance_ms(self.settings.tracing.join_wait_ms + 1)
        self.observer.tick()

    def row_of(self, ledger: Ledger) -> Row:
        """The request as the store has it."""
        (row,) = self.observer.store.find(ledger.request_id)
        return row

    def trace_of(self, ledger: Ledger) -> list[Span]:
        """Its spans as the admin API shows them."""
        known = [*self.observer.store.spans_of(ledger.trace_id), *self.observer.join.spans_of(ledger.trace_id)]
        return trace_of(self.row_of(ledger), known)

    def samples(self) -> dict[str, float]:
        """Every counter and every histogram's count and sum, by name and labels as on the page; zeros left out."""
        found: dict[str, float] = {}
        for family in self.registry.collect():
            if family.type not in ("counter", "histogram"):
                continue
            for sample in family.samples:
                if sample.value and not sample.name.endswith("_bucket"):
                    labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
                    found[f"{sample.name}{{{labels}}}"] = sample.value
        return found


def free_port() -> int:
    """A port of the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@asynccontextmanager
async def bench(
    tmp_path: Path, *, upstreams: tuple[str, ...] = ("a",), dead: tuple[str, ...] = (), **server: Any
) -> AsyncIterator[Bench]:
    """A running bench. The model goes to `upstreams` in their order; nobody listens at those that are `dead`."""
    stage, clock = Stage(), SystemClock()
    async with AsyncExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        client = await stack.enter_async_context(Client(f"http://127.0.0.1:{port}/api", KEY, MODEL, clock))
        made: list[Bench] = []

        async def take_spans(body: bytes) -> None:
            await made[0].take_spans(body)

        targets = []
        for name in upstreams:
            if name in dead:
                targets.append((name, f"http://127.0.0.1:{free_port()}/v1"))
                continue
            scripted = ScriptedUpstream(stage, clock, name=name, send_spans=take_spans)
            await stack.enter_async_context(scripted.serving())
            targets.append((name, scripted.url))
        settings = Settings.model_validate(
            {
                "state_dir": tmp_path,
                "server": {"port": port, "api_key": KEY, **server},
                "engine": {"backend": "none"},
                # Short: when a wait of the join has passed, no request that still runs has waited for too long.
                "tracing": {"join_wait_ms": 500},
                "upstreams": [{"name": name, "url": url} for name, url in targets],
                "models": [{"name": MODEL, "targets": [{"upstream": name} for name, _ in targets]}],
            }
        )
        settings.run_dir.mkdir(parents=True)
        found = Bench(settings, stage, client)
        made.append(found)
        found.observer.store.open()
        stack.callback(found.observer.store.close)
        intake = await asyncio.start_unix_server(found.take_connection, settings.intake_socket)
        stack.callback(intake.close)
        config = uvicorn.Config(
            found.worker.app, http=Protocol, lifespan="on", access_log=False, log_level="error",
            timeout_graceful_shutdown=1,
        )  # fmt: skip
        server_of_worker = uvicorn.Server(config)
        serving = asyncio.create_task(server_of_worker.serve(sockets=[listener]))
        while not server_of_worker.started:
            await asyncio.sleep(0.005)
        try:
            yield found
        finally:
            server_of_worker.should_exit = True
            await serving
