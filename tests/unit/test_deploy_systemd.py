"""The systemd units: verbs, settings, time to drain; `systemd-analyze` where it is at hand."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from deploy_rig import UNITS, unit_environment, unit_lines, unknown_variables
from typer.main import get_command

from cli.errors import Exit
from cli.instance import ENGINE_GRACE_SECONDS, GRACE_SECONDS
from cli.main import app
from settings.schema import ServerSettings

SERVICES = sorted(UNITS.glob("*.service"))
ALL = pytest.mark.parametrize("unit", SERVICES, ids=lambda unit: unit.stem)
MOST_EXPOSED = 20
"""Tenths, of systemd-analyze's 0 (nothing is left open) to 10."""


def test_there_is_one_for_each_way_to_run() -> None:
    starts = {unit.stem: dict(unit_lines(unit))["ExecStart"].split()[1] for unit in SERVICES}
    assert starts == {"tokenline": "up", "tokenline-gateway": "gateway", "tokenline-engine": "engine"}


@ALL
def test_it_starts_a_verb_with_settings_that_exist(unit: Path) -> None:
    keys = dict(unit_lines(unit))
    _, verb, *rest = keys["ExecStart"].split()
    command = get_command(app).commands[verb]  # type: ignore[attr-defined]
    options = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in rest if word.startswith("--")} <= options
    assert unknown_variables(unit_environment(unit)) == []
    credentials = {value.partition(":")[0] for key, value in unit_lines(unit) if key == "LoadCredential"}
    used = {value.removeprefix("%d/") for value in unit_environment(unit).values() if value.startswith("%d/")}
    assert used == credentials
    assert ("ExecReload" in keys) is (verb != "engine")  # docs/reload.md


@ALL
def test_it_drains_and_does_not_try_wrong_settings_again(unit: Path) -> None:
    keys = dict(unit_lines(unit))
    needed = ServerSettings().drain_seconds + max(ENGINE_GRACE_SECONDS, 2 * GRACE_SECONDS)
    assert float(keys["TimeoutStopSec"]) >= needed
    assert keys["KillMode"] == "mixed"
    assert int(keys["RestartPreventExitStatus"]) == Exit.USAGE


def test_gpu_conf_undoes_what_hides_gpus_and_nothing_else() -> None:
    hidden = dict(unit_lines(UNITS / "tokenline.service"))
    for key, value in unit_lines(UNITS / "gpu.conf"):
        if key in hidden and key != "Environment":
            assert (hidden[key], value) == ("yes", "no"), key
    assert unknown_variables(unit_environment(UNITS / "gpu.conf")) == []


@ALL
def test_systemd_itself_finds_no_fault_and_little_exposed(unit: Path, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed (Debian and Ubuntu: apt-get install systemd)")
    copy = tmp_path / unit.name
    copy.write_text(re.sub(r"^ExecStart=\S+", f"ExecStart={sys.executable}", unit.read_text(), flags=re.MULTILINE))
    verified = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copy)], capture_output=True, text=True, timeout=60
    )
    assert (verified.returncode, verified.stdout + verified.stderr) == (0, "")
    judged = subprocess.run(
        ["systemd-analyze", "security", "--offline=yes", f"--threshold={MOST_EXPOSED}", str(copy)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert judged.returncode == 0, judged.stdout[-200:]
