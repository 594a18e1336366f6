"""`make gpu-check`: what it says without a GPU, what counts as passed, and that nothing that it started stays."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from gpu import check

MACHINE = {"torch": "2.13.0", "cuda": "13.0", "gpus": [{"name": "a GPU", "memory_bytes": 1, "capability": "9.0"}]}
PASSED = {"tests": 31, "failures": 0, "errors": 0, "skipped": 0}


def checked(tmp_path: Path, monkeypatch, machine: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    out = tmp_path / "out" / "gpu-check.json"
    monkeypatch.setattr(check, "machine", lambda: machine)
    monkeypatch.setattr(sys, "argv", ["check.py", "--out", str(out)])
    return check.main(), json.loads(out.read_text())


def with_commands(monkeypatch, *, counts: dict[str, int] = PASSED, codes: dict[str, int | None] | None = None) -> None:
    """Plays the commands that are run: by a word of theirs, the exit code."""

    def run(command: list[str], _seconds: float) -> tuple[int | None, str, str]:
        words = " ".join(command)
        name = "tests" if "pytest" in words else "gap" if "bench gap" in words else "smoke"
        code = (codes or {}).get(name, 0)
        if name == "tests":
            report = Path(words.rpartition("--junitxml=")[2])
            facts = " ".join(f'{key}="{value}"' for key, value in counts.items())
            report.write_text(f"<testsuites><testsuite {facts}/></testsuites>")
            return code, "", ""
        return code, 'a log line\n{"rows": []}\n' if code == 0 else "", "it broke"

    monkeypatch.setattr(check, "run", run)


def test_without_a_gpu_nothing_is_verified_and_it_says_so(tmp_path, monkeypatch, capsys) -> None:
    code, found = checked(tmp_path, monkeypatch, {"torch": "2.13.0+cpu", "cuda": None, "gpus": []})
    assert code == 3
    assert found["verified"] is False
    assert "no GPU here: nothing verified (torch 2.13.0+cpu finds no CUDA device)" in capsys.readouterr().out


def test_all_steps_passed(tmp_path, monkeypatch) -> None:
    with_commands(monkeypatch)
    code, found = checked(tmp_path, monkeypatch, MACHINE)
    assert (code, found["verified"], found["failed"]) == (0, True, [])
    assert found["gap"]["result"] == {"rows": []}
    assert found["tests"]["tests"] == 31
    assert found["machine"] == MACHINE


@pytest.mark.parametrize(
    ("counts", "codes", "failed"),
    [
        (PASSED | {"failures": 1}, {"tests": 1}, ["tests"]),
        (PASSED | {"skipped": 1}, {}, ["tests"]),
        (dict.fromkeys(PASSED, 0), {"tests": 5}, ["tests"]),
        (PASSED, {"gap": 2}, ["gap"]),
        (PASSED, {"smoke": None}, ["smoke"]),
        (PASSED, {"gap": 1, "smoke": 1}, ["gap", "smoke"]),
    ],
)
def test_what_failed_was_skipped_or_took_too_long_is_not_verified(
    counts: dict[str, int], codes: dict[str, int | None], failed: list[str], tmp_path, monkeypatch
) -> None:
    with_commands(monkeypatch, counts=counts, codes=codes)
    code, found = checked(tmp_path, monkeypatch, MACHINE)
    assert (code, found["verified"], found["failed"]) == (1, False, failed)


def test_the_whole_takes_less_than_eight_minutes() -> None:
    assert sum(check.STEP_SECONDS.values()) <= check.LIMIT_SECONDS < 8 * 60


def test_a_command_that_takes_too_long_is_ended_with_all_that_it_started(tmp_path) -> None:
    pid_file = tmp_path / "pid"
    script = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(120)'])\n"
        f"open({str(pid_file)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(120)"
    )
    began = time.monotonic()
    code, _, err = check.run([sys.executable, "-c", script], 2)
    assert code is None
    assert err.endswith("ended after 2 s")
    pid = int(pid_file.read_text())
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() - began < 20
        time.sleep(0.05)


def test_the_gpu_tests_are_skipped_with_their_reason_where_there_is_no_gpu() -> None:
    if check.machine()["gpus"]:
        pytest.skip("a GPU is here")
    code, out, _ = check.run([sys.executable, "-m", "pytest", str(check.HERE / "test_cuda_kernels.py"), "-rs"], 60)
    assert code == 0
    assert "SKIPPED [20]" in out
    assert "no CUDA device here" in out
