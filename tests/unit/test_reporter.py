"""Reporting: bounded and never in the way, whatever the observer does."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gateway import reporter as module
from gateway.reporter import Reporter
from tracing.clock import host_identity
from tracing.ledger import Closed, Ledger, Record, WorkerState
from tracing.wire import FrameReader


def ledger(number: int) -> Ledger:
    return Ledger(f"req_{number}", "t" * 32, "s" * 16, 1, 1)


def state(dropped: int) -> WorkerState:
    return WorkerState(0, 1, host_identity(), {}, dropped)


@asynccontextmanager
async def running(reporter: Reporter) -> AsyncIterator[None]:
    task = asyncio.create_task(reporter.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class Intake:
    """Listens where the observer would; reads only when told to."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.reading = asyncio.Event()
        self.reading.set()

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frames = FrameReader()
        while True:
            await self.reading.wait()
            data = await reader.read(65536)
            if not data:
                break
            for records in frames.feed(data):
                self.records += records
        writer.close()

    def ids(self) -> list[str]:
        return [record.ledger.request_id for record in self.records if isinstance(record, Closed)]

    async def until(self, count: int) -> list[str]:
        async with asyncio.timeout(5):
            while len(self.ids()) < count:
                await asyncio.sleep(0.005)
        return self.ids()


async def test_what_waits_for_the_observer_arrives_in_order_when_it_comes(tmp_path: Path) -> None:
    reporter = Reporter(tmp_path / "intake", state)
    async with running(reporter):
        for number in range(1200):
            reporter.closed(ledger(number))
        intake = Intake()
        server = await asyncio.start_unix_server(intake.connection, tmp_path / "intake")
        assert await intake.until(1200) == [f"req_{number}" for number in range(1200)]
        assert isinstance(intake.records[0], WorkerState)
        server.close()
    assert reporter.dropped == 0


async def test_without_an_observer_memory_is_bounded_and_the_loss_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_WAITING_RECORDS", 10)
    reporter = Reporter(tmp_path / "nobody", state)
    for number in range(25):
        reporter.closed(ledger(number))
    assert len(reporter._waiting) == 10
    assert reporter.dropped == 15


async def test_a_frozen_observer_stops_nothing_and_gets_what_fits_when_it_thaws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_WAITING_RECORDS", 2000)
    monkeypatch.setattr(module, "MAX_UNSENT_BYTES", 10_000)
    monkeypatch.setattr(module, "HEARTBEAT_SECONDS", 0.02)
    intake = Intake()
    intake.reading.clear()
    server = await asyncio.start_unix_server(intake.connection, tmp_path / "intake")
    reporter = Reporter(tmp_path / "intake", state)
    async with running(reporter):
        await asyncio.sleep(0.05)
        for number in range(20_000):
            reporter.closed(ledger(number))
            if number % 500 == 0:
                await asyncio.sleep(0)
        assert reporter.dropped > 0
        assert len(reporter._waiting) <= 2000
        intake.reading.set()
        arrived = await intake.until(20_000 - reporter.dropped)
        assert arrived == sorted(arrived, key=lambda name: int(name[4:]))
        async with asyncio.timeout(5):
            while not any(isinstance(r, WorkerState) and r.ledgers_dropped == reporter.dropped for r in intake.records):
                await asyncio.sleep(0.01)
    server.close()


async def test_after_the_observer_was_killed_reporting_goes_on_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RECONNECT_SECONDS", 0.01)
    path = tmp_path / "intake"
    reporter = Reporter(path, state)
    async with running(reporter):
        for turn in range(3):
            intake = Intake()
            connections: list[asyncio.StreamWriter] = []

            async def connection(
                reader: asyncio.StreamReader,
                writer: asyncio.StreamWriter,
                intake: Intake = intake,
                connections: list[asyncio.StreamWriter] = connections,
            ) -> None:
                connections.append(writer)
                await intake.connection(reader, writer)

            server = await asyncio.start_unix_server(connection, path)
            reporter.closed(ledger(turn))
            assert f"req_{turn}" in await intake.until(1)
            server.close()
            for writer in connections:
                writer.transport.abort()
            path.unlink()
            while reporter._transport is not None:
                await asyncio.sleep(0.005)
