"""The supervisor: what dies is started again with back-off, and nothing outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from cli.backoff import Backoff
from cli.process import ChildProcess
from cli.supervise import Part, Supervisor

CHILD = """
import multiprocessing, os, sys, time
from cli.child import Control
def idle():
    time.sleep(120)
if __name__ == "__main__":
    control = Control(int(sys.argv[1]))
    control.receive()
    multiprocessing.get_context("spawn").Process(target=idle).start()
    open(sys.argv[2], "a").write(f"{os.getpid()}\\n")
    time.sleep(120)
"""
SUPERVISOR = """
import os, sys, time
from cli.process import ChildProcess
from cli.supervise import Part, Supervisor
def start():
    return ChildProcess((sys.executable, sys.argv[1], str(os.getpid()), sys.argv[2]), b"{}")
supervisor = Supervisor([Part("child", start, 1.0)], say=print)
supervisor.start()
while True:
    supervisor.tick()
    time.sleep(0.05)
"""


class FakeProcess:
    """Ends when the test says so."""

    def __init__(self) -> None:
        self.code: int | None = None
        self.asked_to_end = self.killed = False
        self.ends_when_asked = True
        self.said: str | None = None

    def exit_code(self) -> int | None:
        return self.code

    def failure(self) -> str | None:
        return self.said

    def terminate(self) -> None:
        self.asked_to_end = True
        if self.ends_when_asked:
            self.code = 0

    def kill(self) -> None:
        self.killed = True
        self.code = -9


class Bench:
    """A supervisor of fake processes with a clock that the test moves."""

    def __init__(self, *names: str, grace_seconds: float = 5.0) -> None:
        self.now = 100.0
        self.said: list[str] = []
        self.started: dict[str, list[FakeProcess]] = {name: [] for name in names}
        parts = [Part(name, lambda name=name: self._start(name), grace_seconds) for name in names]  # type: ignore[misc]
        self.supervisor = Supervisor(parts, say=self.said.append, clock=lambda: self.now, sleep=self.sleep)

    def _start(self, name: str) -> FakeProcess:
        self.started[name].append(FakeProcess())
        return self.started[name][-1]

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_the_wait_doubles_from_a_fifth_of_a_second_to_ten_and_starts_over_after_a_healthy_life():
    backoff = Backoff()
    assert [backoff.delay_after(0) for _ in range(8)] == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]
    assert backoff.delay_after(30.0) == 0.2
    assert backoff.delay_after(29.9) == 0.4


def test_what_died_is_started_again_when_its_wait_is_over_and_not_before():
    bench = Bench("a", "b")
    bench.supervisor.start()
    bench.supervisor.mark_ready("a")
    bench.started["a"][0].code = -9
    bench.supervisor.tick()
    bench.now += 0.19
    bench.supervisor.tick()
    assert len(bench.started["a"]) == 1
    bench.now += 0.02
    bench.supervisor.tick()
    assert (len(bench.started["a"]), len(bench.started["b"])) == (2, 1)
    assert "a ended (SIGKILL" in bench.said[0]
    assert "0.2 s" in bench.said[0]


def test_a_part_that_keeps_dying_waits_longer_each_time():
    bench = Bench("a")
    bench.supervisor.start()
    bench.supervisor.mark_ready("a")
    waits = []
    for _ in range(4):
        bench.started["a"][-1].code = 1
        bench.supervisor.tick()
        died = bench.now
        lives = len(bench.started["a"])
        while len(bench.started["a"]) == lives:
            bench.now += 0.05
            bench.supervisor.tick()
        waits.append(bench.now - died)
    assert waits == pytest.approx([0.2, 0.4, 0.8, 1.6], abs=0.06)


def test_a_part_that_was_never_ready_is_not_started_again_and_its_reason_is_known():
    bench = Bench("engine")
    bench.supervisor.start()
    bench.started["engine"][0].said = "model 'x' was not found"
    bench.started["engine"][0].code = 1
    for _ in range(5):
        bench.supervisor.tick()
        bench.now += 20
    assert len(bench.started["engine"]) == 1
    assert bench.supervisor.start_failure is not None
    assert bench.supervisor.start_failure.reason == "model 'x' was not found"


def test_parts_are_ended_one_after_the_other_in_their_order():
    bench = Bench("worker", "engine", "observer")
    bench.supervisor.start()
    worker, engine, observer = (bench.started[name][0] for name in bench.started)
    worker.ends_when_asked = False
    asked_while_the_worker_drains = []

    def sleep(seconds: float) -> None:
        bench.now += seconds
        asked_while_the_worker_drains.append(engine.asked_to_end or observer.asked_to_end)
        if bench.now > 102:
            worker.code = 0

    bench.supervisor._sleep = sleep
    bench.supervisor.stop()
    assert asked_while_the_worker_drains
    assert not any(asked_while_the_worker_drains)
    assert engine.asked_to_end
    assert observer.asked_to_end
    assert not worker.killed


def test_a_part_that_does_not_end_in_its_time_is_killed_and_named():
    bench = Bench("worker", grace_seconds=3)
    bench.supervisor.start()
    bench.started["worker"][0].ends_when_asked = False
    bench.supervisor.stop()
    assert bench.started["worker"][0].killed
    assert bench.now == pytest.approx(103, abs=0.1)
    assert "worker did not end within 3 s" in bench.said[0]


def test_hurry_ends_everything_at_once():
    bench = Bench("worker", "engine")
    bench.supervisor.start()
    for processes in bench.started.values():
        processes[0].ends_when_asked = False
    bench.supervisor.stop(lambda: True)
    assert all(processes[0].killed for processes in bench.started.values())
    assert bench.now == 100.0


def test_what_waits_to_be_started_again_is_not_started_after_the_stop():
    bench = Bench("a")
    bench.supervisor.start()
    bench.supervisor.mark_ready("a")
    bench.started["a"][0].code = 1
    bench.supervisor.tick()
    bench.supervisor.stop()
    bench.now += 60
    bench.supervisor.tick()
    assert len(bench.started["a"]) == 1


def wait_for(condition, seconds: float = 20.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError(f"not within {seconds} s: {condition}")


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


@pytest.fixture
def child_script(tmp_path: Path) -> Path:
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    return script


def pids_in(file: Path, count: int) -> list[int]:
    """The first `count` children that have reported."""
    return wait_for(lambda: file.exists() and len(pids := file.read_text().split()) >= count and [int(p) for p in pids])


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_no_process_is_left_after_the_supervisor_is_killed(tmp_path, child_script, sent):
    script, pid_file = tmp_path / "supervisor.py", tmp_path / "pids"
    script.write_text(SUPERVISOR)
    supervisor = subprocess.Popen([sys.executable, str(script), str(child_script), str(pid_file)], cwd=os.getcwd())
    try:
        (child,) = pids_in(pid_file, 1)
        grandchildren = [process.pid for process in psutil.Process(child).children(recursive=True)]
        assert grandchildren
        supervisor.send_signal(sent)
        supervisor.wait(10)
        wait_for(lambda: not alive([child, *grandchildren]))
    finally:
        supervisor.kill()
        supervisor.wait()


def test_what_a_killed_child_had_started_is_ended_before_it_is_started_again(tmp_path, child_script):
    pid_file = tmp_path / "pids"

    def start() -> ChildProcess:
        return ChildProcess((sys.executable, str(child_script), str(os.getpid()), str(pid_file)), b"{}")

    supervisor = Supervisor([Part("child", start, 1.0)], say=lambda _: None)
    supervisor.start()
    try:
        (first,) = pids_in(pid_file, 1)
        grandchildren = [process.pid for process in psutil.Process(first).children(recursive=True)]
        supervisor.mark_ready("child")
        os.kill(first, signal.SIGKILL)

        def restarted() -> bool:
            supervisor.tick()
            return len(pid_file.read_text().split()) == 2

        wait_for(restarted)
        wait_for(lambda: not alive([first, *grandchildren]))
    finally:
        supervisor.stop()
    assert alive(pids_in(pid_file, 2)) == []


def test_a_childs_own_words_reach_the_supervisor_and_its_prints_do_not():
    script = (
        "import sys\n"
        "from cli.child import Control, run_role\n"
        "from settings.errors import SettingsError\n"
        "def role(feed):\n"
        "    print('noise', feed.settings.server.port)\n"
        "    raise SettingsError('model was not found')\n"
        "sys.exit(run_role(role, Control(int(sys.argv[1]))))\n"
    )
    from settings.loader import load_settings
    from settings.transfer import pack_settings

    line = pack_settings(load_settings(None, {"TOKENLINE_SERVER__PORT": "1234"}).settings)
    child = ChildProcess((sys.executable, "-c", script, str(os.getpid())), line)
    wait_for(lambda: child.exit_code() is not None)
    assert child.exit_code() == 1
    assert child.failure() == "model was not found"


def test_settings_are_not_in_the_arguments_of_a_child(tmp_path, child_script):
    child = ChildProcess((sys.executable, str(child_script), str(os.getpid()), str(tmp_path / "p")), b"sk-secret")
    try:
        pids_in(tmp_path / "p", 1)
        assert "sk-secret" not in " ".join(psutil.Process(child.pid).cmdline())
        assert "sk-secret" not in "".join(psutil.Process(child.pid).environ().values())
    finally:
        child.terminate()
        wait_for(lambda: child.exit_code() is not None)
