"""`vllm serve` in our engine's place: started, waited for, asked, traced, started again. A stand-in plays vLLM."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest
from fake_vllm import STAGES_S, TOKENS
from line_rig import TOKENLINE, Line, free_ports, line

FAKE = Path(__file__).parents[1] / "fake_vllm.py"


@pytest.fixture
def path_with_vllm(tmp_path: Path) -> str:
    """A PATH whose first folder has a `vllm` command."""
    folder = tmp_path / "bin"
    folder.mkdir()
    command = folder / "vllm"
    command.write_text(f"#!{sys.executable}\nimport runpy\nrunpy.run_path({str(FAKE)!r}, run_name='__main__')\n")
    command.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def vllm_of(up: Line) -> psutil.Process:
    return next(p for p in up.processes() if "serve" in p.cmdline() and "org/model" in p.cmdline())


def until_it_answers(up: Line, wait_s: float = 20) -> None:
    deadline = time.monotonic() + wait_s
    while up.chat(stream=True).status_code != 200:
        assert time.monotonic() < deadline, "vLLM never came back"
        time.sleep(0.1)


def environment(tmp_path: Path, **environ: str) -> dict[str, str]:
    """Free ports and a folder of its own."""
    names = ("PORT", "OPS_PORT", "OTLP_PORT")
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("TOKENLINE_", "OTEL_"))},
        "TOKENLINE_STATE_DIR": str(tmp_path / "state"),
        **{f"TOKENLINE_SERVER__{name}": str(port) for name, port in zip(names, free_ports(3), strict=True)},
        **environ,
    }


def run(environ: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command that is expected to end by itself."""
    folder = Path(environ["TOKENLINE_STATE_DIR"]).parent
    return subprocess.run(
        [TOKENLINE, *arguments], env=environ, capture_output=True, text=True, timeout=60, cwd=folder, check=False
    )


def read_stream(up: Line) -> tuple[str, str]:
    """(request id, text) of a streamed answer."""
    answer = up.chat(stream=True)
    assert answer.status_code == 200, answer.text
    return answer.headers["x-request-id"], answer.text


def test_up_starts_vllm_joins_its_spans_and_starts_it_again(path_with_vllm, tmp_path):
    with line(tmp_path, "--backend", "vllm", "--model", "org/model", PATH=path_with_vllm) as up:
        assert up.model == "org/model"
        request_id, text = read_stream(up)
        assert all(token in text for token in TOKENS)
        stages = up.why(request_id)["stages"]
        assert stages["engine_queue"] == pytest.approx(STAGES_S["time_in_queue"] * 1e3, abs=0.01)
        assert stages["engine_prefill"] == pytest.approx(STAGES_S["time_in_model_prefill"] * 1e3, abs=0.01)
        assert "vllm:num_requests_running" in up.metrics()

        vllm_of(up).kill()
        until_it_answers(up)
        log = (tmp_path / "up.log").read_text()
        assert "engine ended (vllm serve ended (SIGKILL)" in log
        assert log.count("INFO loading org/model") == 2, "vLLM's own log is passed on"


def test_a_vllm_without_unix_sockets_is_reached_by_its_port(path_with_vllm, tmp_path):
    port = str(free_ports(1)[0])
    with line(
        tmp_path, "--backend", "vllm", "--model", "org/model",
        PATH=path_with_vllm, TOKENLINE_ENGINE__VLLM_PORT=port,
    ) as up:  # fmt: skip
        assert f"--port {port}" in " ".join(vllm_of(up).cmdline())
        assert up.chat(stream=True).status_code == 200
        assert "vllm:num_requests_running" in up.metrics()
        up.until_metric(1, "tokenline_upstream_up", upstream="engine")


def test_why_vllm_could_not_start_is_told_in_its_own_words(path_with_vllm, tmp_path):
    environ = environment(tmp_path, PATH=path_with_vllm, FAKE_VLLM_FAILS="1")
    ended = run(environ, "up", "--backend", "vllm", "--model", "org/model")
    assert (ended.returncode, ended.stdout) == (1, "")
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith("tokenline: the engine could not start: vllm serve ended (exit code 1)")
    assert last.endswith("ValueError: No available memory for the cache blocks.")


def test_without_vllm_it_is_said_how_to_get_it(tmp_path):
    ended = run(environment(tmp_path, PATH=str(tmp_path)), "up", "--backend", "vllm", "--model", "org/model")
    assert ended.returncode == 2
    assert "pip install vllm" in ended.stderr
    assert "engine.vllm_executable" in ended.stderr


def test_vllm_alone_wants_the_engines_key_and_listens_where_it_was_told(path_with_vllm, tmp_path):
    environ = environment(tmp_path, PATH=path_with_vllm, TOKENLINE_SERVER__API_KEY="sk-engine")
    process = subprocess.Popen(
        [TOKENLINE, "engine", "--backend", "vllm", "--model", "org/model", "--json"],
        env=environ, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["key"] == "sk-engine"
        url = f"http://127.0.0.1:{environ['TOKENLINE_SERVER__PORT']}/v1/chat/completions"
        assert httpx.post(url, json={"model": "org/model", "messages": []}).status_code == 401
        children = psutil.Process(process.pid).children(recursive=True)
        assert not any("sk-engine" in word for child in children for word in child.cmdline())
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    _, alive = psutil.wait_procs(children, timeout=5)
    assert not alive
