"""`tokenline up`, `gateway` and `engine` as processes: starting, dying, ending."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from line_rig import TOKENLINE, Line, free_ports, line

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """Free ports and a folder of its own."""
    ports = free_ports(3)
    names = ("PORT", "OPS_PORT", "OTLP_PORT")
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("TOKENLINE_", "OTEL_"))},
        "TOKENLINE_STATE_DIR": str(tmp_path / "state"),
        **{f"TOKENLINE_SERVER__{name}": str(port) for name, port in zip(names, ports, strict=True)},
        "HF_HUB_OFFLINE": "1",
    }


def run(environ: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command that is expected to end by itself."""
    return subprocess.run(
        [TOKENLINE, *arguments], env=environ, capture_output=True, text=True, timeout=60, cwd=environ_dir(environ)
    )


def environ_dir(environ: dict[str, str]) -> Path:
    return Path(environ["TOKENLINE_STATE_DIR"]).parent


def until(condition, seconds: float = 20):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError(f"not within {seconds} s")


def gone(processes: list[psutil.Process]) -> bool:
    return not [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def started(command: list[str], environ: dict[str, str]) -> tuple[subprocess.Popen[bytes], dict]:
    process = subprocess.Popen(
        [TOKENLINE, *command, "--json"],
        env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=environ_dir(environ),
    )  # fmt: skip
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())


def streaming(up: Line, *, max_tokens: int):
    """A streamed chat completion, as a context manager."""
    message = {"role": "user", "content": "hi"}
    body = {"model": up.model, "stream": True, "max_tokens": max_tokens, "messages": [message]}
    return up.client.stream("POST", "/v1/chat/completions", json=body)


def test_the_printed_curl_line_works_pasted_as_it_stands(environ, tmp_path):
    out = tmp_path / "out"
    with out.open("wb") as stdout:
        process = subprocess.Popen(
            [TOKENLINE, "up", "--device", "simulated"],
            env=environ,
            stdout=stdout,
            stderr=subprocess.DEVNULL,
            cwd=tmp_path,
        )
    try:
        text = until(lambda: "Ctrl-C" in out.read_text() and out.read_text(), 40)
        everyone = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        assert re.search(r"base_url +http://127\.0\.0\.1:\d+/api\n", text)
        assert f"key       {(tmp_path / 'state' / 'key').read_text().strip()}\n" in text
        assert httpx.get(re.search(r"metrics +(http\S+)", text)[1]).status_code == 200
        curl = next(row for row in text.splitlines() if row.startswith("curl "))
        answer = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, timeout=30, check=True).stdout
        assert answer.endswith("data: [DONE]\n\n")
        deltas = [json.loads(event[6:]) for event in answer.split("\n\n") if event.startswith("data: {")]
        assert "".join(event["choices"][0]["delta"].get("content") or "" for event in deltas if event["choices"])
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    until(lambda: gone(everyone), 5)


def test_a_killed_engine_comes_back_and_requests_meanwhile_are_refused_with_retry_after(tmp_path):
    with line(tmp_path, "--device", "simulated") as up:
        assert up.chat(max_tokens=2).status_code == 200
        up.child("engine").kill()
        refused = until(lambda: (answer := up.chat(max_tokens=2)).status_code != 200 and answer, 5)
        assert refused.status_code in (502, 503)
        until(lambda: up.chat(max_tokens=2).status_code == 200, 20)
        assert "engine ended (SIGKILL" in (tmp_path / "up.log").read_text()


@pytest.fixture
def up_to_be_ended(environ) -> Iterator[Line]:
    """A line that the test ends itself; nothing of it may be left."""
    process, facts = started(["up", "--device", "simulated"], environ)
    found = Line(process, environ, facts)
    everyone = found.processes()
    assert len(everyone) >= 5
    try:
        yield found
        process.wait(20)
        until(lambda: gone(everyone), 10)
    finally:
        process.kill()
        process.wait()


def test_nothing_is_left_when_the_supervisor_is_killed(up_to_be_ended):
    up_to_be_ended.process.kill()


def test_ctrl_c_lets_a_running_answer_end(up_to_be_ended):
    process = up_to_be_ended.process
    with streaming(up_to_be_ended, max_tokens=60) as answer:
        chunks = answer.iter_text()
        first = next(chunks)
        process.send_signal(signal.SIGINT)
        assert (first + "".join(chunks)).endswith("data: [DONE]\n\n")
    assert process.wait(20) == 0


def test_a_second_ctrl_c_does_not_wait_for_a_running_answer(up_to_be_ended):
    process = up_to_be_ended.process
    with streaming(up_to_be_ended, max_tokens=2000) as answer:
        next(answer.iter_text())
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        process.send_signal(signal.SIGINT)
        assert process.wait(3) == 0


def test_a_model_that_is_not_there_ends_up_with_the_engines_own_words(environ):
    ended = run(environ, "up", "--model", "/no/such/model.gguf")
    assert (ended.returncode, ended.stdout) == (1, "")
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith("tokenline: the engine could not start: ")
    assert "/no/such/model.gguf" in last


def test_what_the_articles_file_asks_of_our_engine_and_it_cannot_do_is_told(environ):
    file = str(EXAMPLES / "config-throughput.toml")
    del environ["TOKENLINE_SERVER__PORT"]
    ended = run(environ | {"TOKENLINE_API_KEY": "sk-x"}, "up", "--config", file)
    assert ended.returncode == 2
    assert "engine.tensor_parallel_size = 4" in ended.stderr


def test_the_latency_articles_file_starts_on_the_simulated_device(tmp_path):
    with line(tmp_path, "--device", "simulated", "--config", str(EXAMPLES / "config-latency.toml")) as up:
        assert up.chat(max_tokens=2).status_code == 200


def test_a_second_instance_is_refused_for_its_folder_then_for_its_port(tmp_path):
    with line(tmp_path, "--device", "simulated") as up:
        same_folder = up.tokenline("up", "--device", "simulated")
        assert same_folder.returncode == 2
        assert "TOKENLINE_STATE_DIR" in same_folder.stderr
        up.environ["TOKENLINE_STATE_DIR"] = str(tmp_path / "other")
        same_port = up.tokenline("up", "--device", "simulated")
        assert same_port.returncode == 1
        assert f"server.port = {up.environ['TOKENLINE_SERVER__PORT']}" in same_port.stderr


def test_keys_survive_a_restart(tmp_path):
    keys = []
    for _ in range(2):
        with line(tmp_path, "--device", "simulated") as up:
            keys.append(up.key)
    assert keys[0] == keys[1]


def test_a_gateway_in_front_of_an_engine_that_runs_alone(environ, tmp_path):
    engine_port = free_ports(1)[0]
    alone = environ | {
        "TOKENLINE_SERVER__PORT": str(engine_port),
        "TOKENLINE_STATE_DIR": str(tmp_path / "engine"),
        "TOKENLINE_SERVER__API_KEY": "sk-engine",
    }
    config = tmp_path / "gateway.toml"
    config.write_text(
        f'[[upstreams]]\nname = "lone"\nurl = "http://127.0.0.1:{engine_port}/v1"\napi_key_env = "ENGINE_KEY"\n'
        '[[models]]\nname = "public"\ntargets = [{ upstream = "lone", model = "simulated" }]\n'
    )
    processes = []
    try:
        engine, engine_facts = started(["engine", "--device", "simulated"], alone)
        processes.append(engine)
        assert engine_facts["key"] == "sk-engine"
        gateway, facts = started(["gateway", "--config", str(config)], environ | {"ENGINE_KEY": "sk-engine"})
        processes.append(gateway)
        assert facts["model"] == "public"
        up = Line(gateway, environ, facts)
        answer = up.chat(max_tokens=3)
        assert answer.status_code == 200
        seen = up.why(answer.headers["x-request-id"])
        assert (seen["model"], seen["upstream"]) == ("public", "lone")
        assert not [child for child in up.processes() if "engine" in child.cmdline()]
    finally:
        for process in processes:
            process.send_signal(signal.SIGINT)
        assert [process.wait(20) for process in processes] == [0] * len(processes)
