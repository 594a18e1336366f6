"""What every integration test may use: an observer, and a backend that it exports to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from observer_rig import (
    Backend,
    ObserverProcess,
    Start,
)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    running: list[ObserverProcess] = []

    def begin(**options: Any) -> ObserverProcess:
        running.append(ObserverProcess(tmp_path / "state", **options))
        return running[-1]

    yield begin
    for one in running:
        one.close()


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
