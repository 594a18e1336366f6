"""The engine core as a process: it is spoken to over ZeroMQ, and ends when it must."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import zmq

from backend_engine.core.messages import (
    Abort,
    Failed,
    Finished,
    FromCore,
    Gauges,
    Output,
    Outputs,
    Ready,
    Sampling,
    Shutdown,
    Submit,
    decode_from_core,
    encode,
)
from settings.schema import Settings

PATIENCE_MS = 20_000


class Frontend:
    """The other end of a core process."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.settings_file = folder / "settings.json"
        self.settings_file.write_text(settings.model_dump_json())
        self.inbox, self.outbox = f"ipc://{folder}/in", f"ipc://{folder}/out"
        self._context = zmq.Context()
        self._push = self._context.socket(zmq.PUSH)
        self._push.bind(self.inbox)
        self._pull = self._context.socket(zmq.PULL)
        self._pull.bind(self.outbox)
        self.process: subprocess.Popen[bytes] | None = None
        self.seen: dict[str, list[Output]] = defaultdict(list)
        self.gauges = Gauges(0, 0, 0, 0)

    @property
    def command(self) -> list[str]:
        return [
            *(sys.executable, "-m", "backend_engine.core.process", "--settings", str(self.settings_file)),
            *("--inbox", self.inbox, "--outbox", self.outbox),
        ]

    def start(self) -> None:
        self.process = subprocess.Popen(self.command)

    def send(self, message: Submit | Abort | Shutdown) -> None:
        self._push.send(encode(message))

    def receive(self) -> FromCore:
        assert self._pull.poll(PATIENCE_MS), "the core said nothing"
        return decode_from_core(self._pull.recv())

    def receive_until_finished(self, request_id: str) -> Finished:
        while True:
            message = self.receive()
            assert isinstance(message, Outputs)
            self.gauges = message.gauges
            for output in message.outputs:
                self.seen[output.request_id].append(output)
            if self.seen[request_id] and (finished := self.seen[request_id][-1].finished):
                return finished

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._context.destroy(linger=0)


@pytest.fixture
def frontend(tmp_path: Path) -> Iterator[Frontend]:
    settings = Settings.model_validate(
        {"state_dir": tmp_path, "engine": {"device": "simulated"}, "simulated": {"forward_ms": 5}}
    )
    frontend = Frontend(tmp_path, settings)
    yield frontend
    frontend.close()


def submit(name: str, max_tokens: int) -> Submit:
    return Submit(name, [1, 2, 3], Sampling(max_tokens=max_tokens), time.perf_counter_ns())


def test_a_core_serves_aborts_and_ends_on_shutdown(frontend: Frontend) -> None:
    frontend.start()
    ready = frontend.receive()
    assert isinstance(ready, Ready)
    assert ready.device == "simulated"

    frontend.send(submit("long", 10_000))
    frontend.send(submit("short", 4))
    frontend.receive_until_finished("short")
    assert sum(len(output.tokens) for output in frontend.seen["short"]) == 4
    assert frontend.gauges.running == 1

    frontend.send(Abort("long", time.perf_counter_ns()))
    aborted = frontend.receive_until_finished("long")
    assert aborted.reason == "abort"
    assert (frontend.gauges.running, frontend.gauges.kv_used) == (0, 0)

    frontend.send(Shutdown())
    assert frontend.process is not None
    assert frontend.process.wait(10) == 0


def test_an_idle_core_uses_no_cpu_and_ends_on_sigterm(frontend: Frontend) -> None:
    frontend.start()
    frontend.receive()
    assert frontend.process is not None
    core = psutil.Process(frontend.process.pid)
    before = core.cpu_times()
    switches_before = core.num_ctx_switches().voluntary
    time.sleep(0.5)
    after = core.cpu_times()
    assert after.user + after.system - before.user - before.system <= 0.02
    assert core.num_ctx_switches().voluntary - switches_before < 10

    frontend.process.send_signal(signal.SIGTERM)
    assert frontend.process.wait(10) == 0


def test_a_core_ends_on_sigterm_in_the_middle_of_requests(frontend: Frontend) -> None:
    frontend.start()
    frontend.receive()
    frontend.send(submit("long", 10_000))
    frontend.receive()
    assert frontend.process is not None
    frontend.process.send_signal(signal.SIGTERM)
    assert frontend.process.wait(10) == 0


def test_a_core_dies_with_its_parent(frontend: Frontend, tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [
            *(sys.executable, "-c"),
            f"import subprocess, time; print(subprocess.Popen({frontend.command!r}).pid, flush=True); time.sleep(60)",
        ],
        stdout=subprocess.PIPE,
    )
    assert parent.stdout is not None
    core = psutil.Process(int(parent.stdout.readline()))
    assert isinstance(frontend.receive(), Ready)

    parent.kill()
    parent.wait()
    parent.stdout.close()
    psutil.wait_procs([core], timeout=10)
    assert not core.is_running() or core.status() == psutil.STATUS_ZOMBIE


def test_a_core_that_cannot_serve_says_why_and_ends(frontend: Frontend, tmp_path: Path) -> None:
    frontend.settings_file.write_text(
        Settings.model_validate(
            {"state_dir": tmp_path, "engine": {"device": "simulated", "tensor_parallel_size": 4}}
        ).model_dump_json()
    )
    frontend.start()
    failed = frontend.receive()
    assert isinstance(failed, Failed)
    assert "engine.tensor_parallel_size = 4" in failed.message
    assert "vllm" in failed.message.lower()
    assert frontend.process is not None
    assert frontend.process.wait(10) == 1
