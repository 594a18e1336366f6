"""`make gpu-check`: everything that only a GPU can prove, in under 8 minutes, written as one JSON file.

Exit code 0: all of it passed; 1: something failed; 3: there is no GPU here, and so nothing was verified.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as Xml
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LIMIT_SECONDS = 465
STEP_SECONDS = {"tests": 180, "gap": 90, "smoke": 190}
"""At most for each; the whole stays under LIMIT_SECONDS."""
ALL_PASSED, SOMETHING_FAILED, NO_GPU = 0, 1, 3
TAIL = 4000

MACHINE = """
import json, torch
found = {"torch": torch.__version__, "cuda": torch.version.cuda, "gpus": []}
if torch.cuda.is_available():
    for at in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(at)
        found["gpus"].append({"name": facts.name, "memory_bytes": facts.total_memory,
                              "capability": f"{facts.major}.{facts.minor}"})
print(json.dumps(found))
"""


class Deadline:
    """What is left of the whole."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    @property
    def spent(self) -> float:
        return time.monotonic() - self._began

    def left_for(self, step: str) -> float:
        return max(1.0, min(STEP_SECONDS[step], LIMIT_SECONDS - self.spent))


def run(command: list[str], seconds: float) -> tuple[int | None, str, str]:
    """(exit code or None when it took too long, standard output, the end of standard error)."""
    environ = {**os.environ, "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # and what it had started
        out, err = process.communicate()
        return None, out, f"{err[-TAIL:]}\nended after {seconds:.0f} s"
    return process.returncode, out, err[-TAIL:]


def machine() -> dict[str, Any]:
    """What torch finds."""
    code, out, err = run([sys.executable, "-c", MACHINE], 90)
    if code != 0:
        return {"gpus": [], "error": err.strip().splitlines()[-1] if err.strip() else f"exit code {code}"}
    found: dict[str, Any] = json.loads(out)
    return found


def gpu_tests(seconds: float) -> dict[str, Any]:
    """The tests marked `gpu`. One that was skipped verified nothing, so it counts as failed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", str(HERE), "-m", "gpu", "-q", f"--junitxml={report}"]
        code, out, err = run(command, seconds)
        counts = {name: 0 for name in ("tests", "failures", "errors", "skipped")}
        if report.exists():
            for suite in Xml.parse(report).getroot().iter("testsuite"):  # noqa: S314  our own file
                counts = {name: counts[name] + int(suite.get(name, 0)) for name in counts}
    is_ok = code == 0 and counts["tests"] > 0 and not counts["skipped"]
    return {"ok": is_ok, "exit_code": code, **counts, "output": "" if is_ok else (out + err)[-TAIL:]}


def json_of(command: list[str], seconds: float) -> dict[str, Any]:
    """A command that prints one JSON document."""
    code, out, err = run(command, seconds)
    try:
        return {"ok": code == 0, "exit_code": code, "result": json.loads(out.strip().splitlines()[-1])}
    except (ValueError, IndexError):
        return {"ok": False, "exit_code": code, "output": (out + err)[-TAIL:]}


def check() -> tuple[int, dict[str, Any]]:
    """(exit code, what goes into the file)."""
    deadline = Deadline()
    found = machine()
    if not found["gpus"]:
        why = found.get("error") or f"torch {found['torch']} finds no CUDA device"
        print(f"no GPU here: nothing verified ({why})")
        return NO_GPU, {"verified": False, "machine": found, "reason": why}
    tokenline = str(Path(sys.executable).with_name("tokenline"))
    steps: dict[str, dict[str, Any]] = {}
    for name in STEP_SECONDS:
        print(f"{deadline.spent:4.0f} s  {name} ...", flush=True)
        seconds = deadline.left_for(name)
        if name == "tests":
            steps[name] = gpu_tests(seconds)
        elif name == "gap":
            steps[name] = json_of([tokenline, "bench", "gap", "--json"], seconds)
        else:
            steps[name] = json_of([sys.executable, str(HERE / "smoke.py")], seconds)
        print(f"{deadline.spent:4.0f} s  {name} {'passed' if steps[name]['ok'] else 'FAILED'}", flush=True)
        if not steps[name]["ok"]:
            print(steps[name].get("output", ""), file=sys.stderr)
    failed = [name for name, step in steps.items() if not step["ok"]]
    code = SOMETHING_FAILED if failed else ALL_PASSED
    return code, {"verified": not failed, "failed": failed, "seconds": deadline.spent, "machine": found, **steps}


def main() -> int:
    """Writes the file and says where it is."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = Path(os.environ.get("OUT", ".")) / "gpu-check.json"
    parser.add_argument("--out", type=Path, default=default, help="where the JSON goes [default: $OUT or .]")
    out: Path = parser.parse_args().out
    code, found = check()
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(found, indent=2) + "\n")
    print(f"written to {out}")
    return code


if __name__ == "__main__":
    sys.exit(main())
