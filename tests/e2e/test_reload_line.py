"""A running `tokenline up` that is told to read its configuration again."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from line_rig import Line, line

pytestmark = pytest.mark.e2e

ENVIRON = {"TOKENLINE_SERVER__WORKERS": "2", "TOKENLINE_SIMULATED__FORWARD_MS": "10"}
MODEL = '[[models]]\nname = "{}"\ntargets = [{{ upstream = "engine" }}]\n'


def until(holds: Callable[[], bool], seconds: float = 15) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def models_of_both_workers(up: Line) -> set[tuple[str, ...]]:
    """What /models says over twenty connections: the kernel deals them out to the workers."""
    alone = httpx.Limits(max_keepalive_connections=0)
    with httpx.Client(headers={"authorization": f"Bearer {up.key}"}, limits=alone, trust_env=False) as client:
        answers = [client.get(up.base_url + "/models").json() for _ in range(20)]
    return {tuple(sorted(model["id"] for model in answer["data"])) for answer in answers}


def test_models_come_and_go_on_every_worker_while_a_stream_runs(tmp_path: Path) -> None:
    file = tmp_path / "tokenline.toml"
    start = '[engine]\ndevice = "simulated"\n'
    file.write_text(start + MODEL.format("old"))
    with line(tmp_path, "--config", str(file), **ENVIRON) as up:
        body = {"model": "old", "stream": True, "max_tokens": 200, "messages": [{"role": "user", "content": "hi"}]}
        with up.client.stream("POST", "/v1/chat/completions", json=body) as answer:
            pieces = answer.iter_text()
            first = next(pieces)
            file.write_text(
                start
                + MODEL.format("new")
                + "[server]\nops_host = '127.0.0.2'\n[plans.free]\nrequests_per_minute = 5\n"
            )
            done = up.tokenline("config", "reload", "--config", str(file), "--ops-url", up.ops_url, "--json")
            assert done.returncode == 0, done.stderr
            told = json.loads(done.stdout)
            assert (told["added"], told["removed"]) == (["models.new", "plans.free"], ["models.old"])
            assert (told["needs_restart"], told["late"]) == (["server.ops_host"], [])
            assert models_of_both_workers(up) == {("new", "simulated")}
            assert (first + "".join(pieces)).endswith("data: [DONE]\n\n")
        # What starts later starts with it; keys are made with the new plans.
        up.child("worker:1").kill()
        admin = httpx.Client(base_url=up.ops_url + "/admin/v1", headers={"x-api-key": admin_key(tmp_path)})
        assert admin.post("/keys", json={"alias": "app", "plan": "free"}).status_code == 201
        # By signal, and a file that is wrong.
        file.write_text(start + "[server]\nprot = 1\n")
        up.process.send_signal(signal.SIGHUP)
        up.until_metric(1, "tokenline_config_reloads_total", result="failed")
        log = (tmp_path / "up.log").read_text()
        assert "configuration not reloaded: " in log
        assert "server.port" in log
        refused = admin.post("/reload")
        assert refused.status_code == 422
        assert "server.port" in refused.json()["error"]["message"]
        until(lambda: "gateway worker 1 ended" in (tmp_path / "up.log").read_text())
        assert models_of_both_workers(up) == {("new", "simulated")}
        file.write_text(start)
        up.process.send_signal(signal.SIGHUP)
        up.until_metric(2, "tokenline_config_reloads_total", result="ok")
        assert time.time() - up.metric("tokenline_config_last_success_timestamp_seconds") < 60
        until(lambda: models_of_both_workers(up) == {("simulated",)})
        assert up.metric("tokenline_config_reloads_total", result="failed") == 2


def test_no_request_fails_while_the_configuration_is_reloaded_again_and_again(tmp_path: Path) -> None:
    file = tmp_path / "tokenline.toml"
    files = [
        '[engine]\ndevice = "simulated"\n' + MODEL.format("kept") + MODEL.format(f"model-{number % 2}")
        + f"[server]\nmax_concurrent_requests = {64 + number % 3}\nqueue_size = 100\n"
        for number in range(20)
    ]  # fmt: skip
    file.write_text(files[0])
    with line(tmp_path, "--config", str(file), **ENVIRON) as up, ThreadPoolExecutor(8) as pool:
        is_over = threading.Event()

        def ask(number: int) -> Counter[int]:
            statuses: Counter[int] = Counter()
            body = {"model": "kept", "max_tokens": 3 + number, "stream": number % 2 == 0, "messages": []}
            body["messages"] = [{"role": "user", "content": "hi"}]
            with httpx.Client(headers={"authorization": f"Bearer {up.key}"}, timeout=60) as client:
                while not is_over.is_set():
                    answer = client.post(up.base_url + "/chat/completions", json=body)
                    whole = answer.text.endswith("data: [DONE]\n\n") or "usage" in answer.text
                    statuses[answer.status_code if whole else -1] += 1
            return statuses

        asking = [pool.submit(ask, number) for number in range(8)]
        admin = httpx.Client(base_url=up.ops_url + "/admin/v1", headers={"x-api-key": admin_key(tmp_path)}, timeout=20)
        try:
            for text in files[1:]:
                file.write_text(text)
                done = admin.post("/reload")
                assert done.status_code == 200, done.text
                assert done.json()["late"] == []
        finally:
            is_over.set()
        statuses = sum((one.result() for one in asking), Counter())
        assert statuses.keys() == {200}
        assert statuses[200] > 100
        up.until_metric(statuses[200], "tokenline_requests_total", outcome="ok")
        until(lambda: up.metric("tokenline_inflight_requests", upstream="engine") == 0)


def admin_key(tmp_path: Path) -> str:
    return (tmp_path / "state" / "admin-key").read_text().strip()
