"""Each file is read by the program that it is written for, as far as that can be had without a daemon."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deploy_rig import COMPOSE, DEPLOY, DOCKERFILE, ROOT

Tool = Callable[[str], str]
Program = Callable[[str, str], str]


def run(*command: str, cwd: Path = ROOT) -> str:
    """Standard output. Fails with all that was said."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_hadolint_has_nothing_to_say(tool: Tool) -> None:
    assert run(tool("hadolint"), "--no-color", str(DOCKERFILE)) == ""


def test_docker_compose_reads_both_files(tool: Tool, tmp_path: Path) -> None:
    for name in ("deploy", "dashboards"):
        shutil.copytree(ROOT / name, tmp_path / name)
    compose = tmp_path / "deploy" / "compose"
    run("sh", str(compose / "make-secrets.sh"))
    files = ("-f", str(compose / "compose.yaml"), "-f", str(compose / "compose.cuda.yaml"))
    read: dict[str, Any] = json.loads(run(tool("docker-compose"), *files, "config", "--format", "json"))
    services = read["services"]
    assert services["engine"]["build"]["target"] == "cuda"
    assert services["engine"]["environment"]["TOKENLINE_ENGINE__DEVICE"] == "cuda"
    for service in services.values():
        for volume in service.get("volumes", []):
            assert volume["type"] == "volume" or Path(volume["source"]).exists(), volume
    assert {port["host_ip"] for service in services.values() for port in service.get("ports", [])} == {"127.0.0.1"}


def test_prometheus_reads_its_configuration(program: Program, tmp_path: Path) -> None:
    shutil.copy(COMPOSE / "prometheus.yml", tmp_path)
    shutil.copytree(ROOT / "dashboards" / "prometheus" / "rules", tmp_path / "rules")
    run(program("promtool", "prometheus"), "check", "config", str(tmp_path / "prometheus.yml"))


def test_alertmanager_sends_pages_and_tickets_to_their_own(program: Program) -> None:
    config = str(COMPOSE / "alertmanager.yml")
    amtool = program("amtool", "prometheus-alertmanager")
    run(amtool, "check-config", config)
    for severity in ("page", "ticket"):
        assert (
            run(amtool, "config", "routes", "test", f"--config.file={config}", f"severity={severity}").strip()
            == severity
        )


def test_scripts_are_plain_shell(tool: Tool) -> None:
    for script in DEPLOY.rglob("*.sh"):
        run("sh", "-n", str(script))
