"""The observer is killed twenty times while requests come in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from killing_rig import kill_under_load
from observer_rig import ObserverProcess, Start

pytestmark = pytest.mark.e2e


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    running: list[ObserverProcess] = []

    def begin(**options: Any) -> ObserverProcess:
        running.append(ObserverProcess(tmp_path / "state", **options))
        return running[-1]

    yield begin
    for one in running:
        one.close()


def test_killed_twenty_times_under_load_the_store_opens_again_with_whole_traces(start: Start) -> None:
    kill_under_load(start, 20)
