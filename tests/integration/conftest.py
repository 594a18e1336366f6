"""What every integration test may use: an observer, a backend that it exports to, a Redis."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from observer_rig import (
    Backend,
    ObserverProcess,
    Start,
    starting,
)
from redis_rig import RedisServer, redis_server


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with starting(tmp_path) as begin:
        yield begin


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObserverProcess]:
    """One observer for tests that only ask or add; each uses ids of its own."""
    observer = ObserverProcess(tmp_path_factory.mktemp("shared") / "state").wait_healthy()
    yield observer
    observer.close()


@pytest.fixture
def backend() -> Iterator[Backend]:
    made = Backend()
    yield made
    made.close()


@pytest.fixture(scope="module")
def redis_running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture
def redis_alone(redis_running: RedisServer) -> RedisServer:
    """The server with nothing in it."""
    redis_running.client().flushall()
    return redis_running
