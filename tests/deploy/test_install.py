"""The Dockerfile's steps in bare environments; what they install runs as another user, from folders it cannot write."""

from __future__ import annotations

import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from deploy_rig import COMPOSE, DOCKERFILE, PROJECT, ROOT, compose, docker_args, image_environment, with_secrets

USER = 10001
READY_SECONDS = 90.0


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as the Dockerfile's stage does, from what .dockerignore lets through."""
    source = tmp_path_factory.mktemp("source")
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    subprocess.run(["cp", "-r", *allowed, str(source)], cwd=ROOT, check=True)
    folder = tmp_path_factory.mktemp("wheel")
    _pip("wheel", "--no-deps", "--wheel-dir", str(folder), str(source))
    (built,) = folder.iterdir()
    return built


def _pip(*arguments: str, into: Path | None = None) -> None:
    target = ["--python", str(into)] if into is not None else []
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *target, *arguments],
        capture_output=True, text=True, timeout=1200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]


def interpreter() -> str:
    """A Python that the other user may start too: one below root's home is closed to it."""
    for candidate in (sys.executable, "/usr/local/bin/python3", "/usr/bin/python3"):
        path = Path(candidate).resolve()
        if path.exists() and (os.getuid() or all(folder.stat().st_mode & 0o001 for folder in path.parents)):
            question = "import ensurepip, sys; sys.exit(sys.version_info < (3, 11))"
            if subprocess.run([candidate, "-c", question], capture_output=True).returncode == 0:
                return candidate
    pytest.skip("there is no Python 3.11 with venv that a user other than root can start")


def install(folder: Path, wheel: Path, extras: list[str]) -> Path:
    """An environment with the packages of those extras and the wheel, as the stages make it. Gives its bin folder."""
    subprocess.run([interpreter(), "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python3"
    if "engine" in extras:
        _pip("install", docker_args()["TORCH"], into=python)
    optional = PROJECT["project"]["optional-dependencies"]
    needs = [*PROJECT["project"]["dependencies"], *(need for extra in extras for need in optional[extra])]
    _pip("install", *needs, into=python)
    _pip("install", "--no-deps", str(wheel), into=python)
    subprocess.run(["chmod", "-R", "a+rX,a-w", str(folder)], check=True)
    return python.parent


def extras_of(stage: str) -> list[str]:
    """Those that the Dockerfile's stage asks for."""
    text = next(part for part in DOCKERFILE.read_text().split("\nFROM ") if part.startswith(stage))
    asked = re.search(r"needs\.py ([a-z ]+) >", text)
    assert asked is not None
    return asked[1].split()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def own_ports() -> dict[str, str]:
    return {f"TOKENLINE_SERVER__{name}": str(free_port()) for name in ("PORT", "OPS_PORT", "OTLP_PORT")}


@contextmanager
def running(bin_folder: Path, tmp_path: Path, environ: dict[str, str], *arguments: str) -> Iterator[Any]:
    """As the image's user where this is root; its folders are the only ones that it owns."""
    state, cache = tmp_path / "state", tmp_path / "cache"
    for folder in (state, cache):
        folder.mkdir(mode=0o700)
    user = {}
    if os.getuid() == 0:
        for folder in (state, cache):
            os.chown(folder, USER, USER)
        for folder in (tmp_path, *tmp_path.parents):
            if folder.owner() == "root" and folder != Path("/"):
                folder.chmod(folder.stat().st_mode | 0o755)
        user = {"user": USER, "group": USER, "extra_groups": []}
    environ = {**environ, "HOME": str(state), "TOKENLINE_STATE_DIR": str(state), "TOKENLINE_CACHE_DIR": str(cache)}
    environ["PATH"] = f"{bin_folder}:/usr/bin:/bin"
    process = subprocess.Popen(
        [str(bin_folder / "tokenline"), *arguments],
        env=environ, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **user,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        finally:
            process.kill()


def until_ready(process: Any, port: int) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        link = http.client.HTTPConnection("127.0.0.1", port, timeout=4)
        try:
            link.request("GET", "/readyz")
            if link.getresponse().status == 200:
                return
        except OSError:
            time.sleep(0.2)
        finally:
            link.close()
    process.kill()
    raise AssertionError(process.communicate()[1][-2000:])


def test_the_gateways_image_serves_without_torch(wheel: Path, tmp_path: Path) -> None:
    bin_folder = install(tmp_path / "tokenline", wheel, extras_of("${PYTHON_IMAGE} AS packages"))
    assert not list((tmp_path / "tokenline").rglob("site-packages/torch"))
    given = {**image_environment(), **compose()["gateway"]["environment"]}
    ports = own_ports()
    environ = with_secrets(given, tmp_path) | ports
    environ["TOKENLINE_SERVER__BASE_URL"] = f"http://127.0.0.1:{ports['TOKENLINE_SERVER__PORT']}/api"
    environ["TOKENLINE_SERVER__HOST"] = environ["TOKENLINE_SERVER__OPS_HOST"] = "127.0.0.1"
    environ["TOKENLINE_SERVER__OTLP_HOST"] = "127.0.0.1"
    del environ["TOKENLINE_REDIS__URL_FILE"], environ["OTEL_EXPORTER_OTLP_ENDPOINT"]  # neither is here
    with running(
        bin_folder, tmp_path, environ, "gateway", "--config", str(COMPOSE / "config" / "tokenline.toml")
    ) as process:
        until_ready(process, int(ports["TOKENLINE_SERVER__OPS_PORT"]))
        link = http.client.HTTPConnection("127.0.0.1", int(ports["TOKENLINE_SERVER__PORT"]), timeout=10)
        link.request("GET", "/api/v1/models", headers={"authorization": "Bearer secret-api-key"})
        answer = link.getresponse()
        assert (answer.status, b"smollm2" in answer.read()) == (200, True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert (tmp_path / "state" / "traces.sqlite").exists()


def test_the_engines_image_answers(wheel: Path, tmp_path: Path) -> None:
    bin_folder = install(tmp_path / "tokenline", wheel, extras_of("packages AS packages-cpu"))
    shown = subprocess.run([str(bin_folder / "tokenline"), "--help"], capture_output=True, text=True, check=True)
    assert "tokenline up" in shown.stdout
    ports = own_ports()
    environ = image_environment() | ports | {"TOKENLINE_SERVER__HOST": "127.0.0.1", "TOKENLINE_SERVER__API_KEY": "sk-x"}
    environ["TOKENLINE_SERVER__OPS_HOST"] = "127.0.0.1"
    with running(bin_folder, tmp_path, environ, "up", "--device", "simulated") as process:
        until_ready(process, int(ports["TOKENLINE_SERVER__OPS_PORT"]))
        deadline = time.monotonic() + READY_SECONDS
        status = 0
        while status != 200 and time.monotonic() < deadline and process.poll() is None:
            link = http.client.HTTPConnection("127.0.0.1", int(ports["TOKENLINE_SERVER__PORT"]), timeout=30)
            body = '{"model": "simulated", "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]}'
            link.request("POST", "/api/v1/chat/completions", body, {"authorization": "Bearer sk-x"})
            status = link.getresponse().status
            time.sleep(0.2)
        assert status == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
