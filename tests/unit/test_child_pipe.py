"""The pipes between the supervisor and a child that runs: new settings go down, what became of them comes up."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from cli.process import ChildProcess
from settings.loader import load_settings
from settings.schema import Settings
from settings.transfer import pack_settings

ROLE = """
import asyncio, sys
from cli.child import Control, run_role

async def main(feed):
    feed.listen(lambda settings: feed.answer({"plans": len(settings.plans)}))
    await asyncio.sleep(60)

sys.exit(run_role(lambda feed: asyncio.run(main(feed)), Control(int(sys.argv[1]))))
"""


def settings(plans: int = 0) -> Settings:
    found = load_settings(None, {}).settings
    return Settings.model_validate(
        {**found.model_dump(), "plans": {f"plan-{number}": {"requests_per_minute": 1} for number in range(plans)}}
    )


@pytest.fixture
def child() -> Iterator[ChildProcess]:
    running = ChildProcess((sys.executable, "-c", ROLE, str(os.getpid())), pack_settings(settings()))
    yield running
    running.kill()
    while running.exit_code() is None:
        time.sleep(0.01)


def heard(child: ChildProcess, count: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    deadline = time.monotonic() + 20
    while len(found) < count:
        assert time.monotonic() < deadline, found
        assert child.exit_code() is None, child.failure()
        found += child.messages()
        time.sleep(0.01)
    return found


def test_settings_sent_before_the_child_listens_and_larger_than_the_pipe_are_taken_in_order(child) -> None:
    os.kill(child.pid, signal.SIGSTOP)
    began = time.monotonic()
    for number, plans in ((1, 3), (2, 3000), (3, 1)):
        child.send({"number": number, "settings": pack_settings(settings(plans)).decode()})
    assert time.monotonic() - began < 5  # nobody waits for a child that does not read
    assert child.messages() == []
    os.kill(child.pid, signal.SIGCONT)
    assert heard(child, 6) == [
        {"plans": 3}, {"applied": 1}, {"plans": 3000}, {"applied": 2}, {"plans": 1}, {"applied": 3},
    ]  # fmt: skip


def test_a_child_that_has_ended_is_told_in_vain(child) -> None:
    child.kill()
    while child.exit_code() is None:
        time.sleep(0.01)
    child.send({"number": 1, "settings": "x"})
    assert child.messages() == []
    assert child.failure() is None
