"""`tokenline bench run`, `sample` and `compare` as a user calls them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from bench_rig import DONE, endpoint, event, streamed, usage
from line_rig import TOKENLINE

KEY = "sk-test-of-the-bench"


async def chat(request: web.Request) -> web.StreamResponse:
    """20 ms to the first token, 10 ms to each of the two that follow."""
    await request.read()
    if request.headers.get("authorization") != f"Bearer {KEY}":
        return web.Response(status=401, text="who are you?")
    tail = (event(finish="stop"), usage(64, 3), DONE)
    return await streamed(request, 0.02, event("a"), 0.01, event("b"), 0.01, event("c"), *tail)


async def begin(state: Path, *arguments: str, key: str = KEY) -> asyncio.subprocess.Process:
    variables = {k: v for k, v in os.environ.items() if not k.startswith("TOKENLINE_")}
    variables |= {"TOKENLINE_STATE_DIR": str(state), "TOKENLINE_API_KEY": key, "COLUMNS": "100"}
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(TOKENLINE, "bench", *arguments, env=variables, stdout=pipe, stderr=pipe)


async def bench(state: Path, *arguments: str, key: str = KEY) -> tuple[int, str, str]:
    process = await begin(state, *arguments, key=key)
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


def settings_file(folder: Path, base_url: str) -> str:
    """The example as it stands, but for the address and the times."""
    given = json.loads((Path(__file__).parents[2] / "docs" / "examples" / "settings.json").read_text())
    given["api"]["base_url"] = base_url
    given["load_test"] |= {"concurrency": 4, "duration_seconds": 1.0, "warmup_seconds": 0.1}
    file = folder / "settings.json"
    file.write_text(json.dumps(given))
    return str(file)


async def test_a_run_is_told_kept_and_compared(tmp_path):
    state = tmp_path / "s"
    async with endpoint(chat) as url:
        file = settings_file(tmp_path, url)
        code, out, err = await bench(state, "run", "--settings", file, "--json")
        assert code == 0, err
        told: dict[str, Any] = json.loads(out)
        code, out, err = await bench(state, "run", "--settings", file)
        assert code == 0, err
        assert "4 in flight, 1 s counted" in out
        assert "mean is for reference" in out
    stage = told["stages"][0]
    assert stage["concurrency"] == 4
    assert stage["counted_seconds"] == 1.0
    assert stage["errors"] == 0
    assert 20 <= stage["ttft_ms"]["p50"] <= stage["ttft_ms"]["p95"] <= stage["ttft_ms"]["p99"]
    assert stage["tpot_ms"]["p50"] >= 9
    assert stage["e2e_ms"]["p50"] >= 40
    assert stage["tps"] == pytest.approx(3 * stage["rps"], rel=0.2)
    kept = json.loads(Path(told["file"]).read_text())
    assert KEY not in json.dumps(kept)
    assert (kept["base_url"], kept["model"], len(kept["key_fingerprint"])) == (url, "m", 12)
    assert len(kept["requests"]["end_us"]) >= stage["requests"]

    code, out, err = await bench(state, "compare", told["run"], "last", "--json", "--fail-on", "e2e_p50>+300%")
    assert code == 0, err
    found = {difference["metric"]: difference for difference in json.loads(out)["differences"]}
    assert found["ttft_p50"]["low"] <= found["ttft_p50"]["b"] - found["ttft_p50"]["a"] <= found["ttft_p50"]["high"]
    _, out, _ = await bench(state, "compare", "last", "last", "--json")
    assert json.loads(out)["flagged"] == ["A and B are one and the same run"]
    other = kept | {"run": "20200101-000000-aaaa", "model": "n"}
    (state / "runs" / "20200101-000000-aaaa.json").write_text(json.dumps(other))
    code, out, err = await bench(state, "compare", "20200101", "last")
    assert (code, out) == (2, "")
    assert "not comparable: model: n and m" in err
    code, out, _ = await bench(state, "compare", "20200101", "last", "--anyway")
    assert code == 0
    assert "e2e_p99" in out


async def test_ctrl_c_ends_a_run_and_keeps_it(tmp_path):
    began = asyncio.Event()

    async def watched(request: web.Request) -> web.StreamResponse:
        began.set()
        return await chat(request)

    async with endpoint(watched) as url:
        process = await begin(
            tmp_path, "run", "--base-url", url, "--stages", "2:600s", "--prompt-tokens", "64", "--json"
        )
        await asyncio.wait_for(began.wait(), 30)
        await asyncio.sleep(0.5)
        process.send_signal(signal.SIGINT)
        out, err = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 1
    told = json.loads(out)
    assert told["stopped"] == "it was stopped by hand"
    assert told["stages"][0]["ttft_ms"]["count"] > 0, err
    assert Path(told["file"]).is_file()


async def test_a_sampling_shows_every_request_and_its_health(tmp_path):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    async with endpoint(chat) as url:
        code, out, err = await bench(tmp_path / "s", "sample", "-n", "3", "--base-url", url)
        assert code == 0, err
        for group in ("short", "long", "mixed"):
            assert sum(line.startswith(f"{group} ") and "64" in line for line in out.splitlines()) >= 3
        assert "unknown short: P99 TTFT" in out
        command = ("sample", "-n", "20", "--base-url", url, "--prompts", str(prompts), "--json")
        code, out, err = await bench(tmp_path / "s", *command)
    told = json.loads(out)
    assert [stage["group"] for stage in told["stages"]] == ["file"]
    assert told["stages"][0]["requests"] == 20
    assert {rule["rule"].split()[1] for rule in told["health"]} == {"TTFT", "TPOT", "request"}
    assert {rule["result"] for rule in told["health"] if "TTFT" in rule["rule"]} <= {"pass", "watch", "fail"}
    assert code == int(any(rule["result"] == "fail" for rule in told["health"]))


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["run", "--settings", "none.json"], 2, "no such file"),
        (["run", "--key-env", "NOT_SET_HERE"], 2, "NOT_SET_HERE is not set"),
        (["run", "--base-url", "http://127.0.0.1:1/v1"], 4, "can't be reached"),
        (["compare", "a", "b"], 3, "no such run"),
        (["compare", "a", "b", "--fail-on", "speed>1%"], 2, "--fail-on"),
    ],
)
async def test_what_cannot_be_done_is_one_line_and_an_exit_code(tmp_path, arguments, code, words):
    found, out, err = await bench(tmp_path, *arguments)
    assert (found, out) == (code, "")
    assert words in err
    assert "Traceback" not in err


async def test_a_folder_that_can_not_be_used_is_told_before_anything_is_measured(tmp_path):
    (tmp_path / "s").write_text("a file, not a folder")
    async with endpoint(chat) as url:
        code, out, err = await bench(tmp_path / "s", "run", "--base-url", url, "--duration", "600s")
    assert (code, out) == (1, "")
    assert "TOKENLINE_STATE_DIR names another folder" in err


async def test_a_wrong_key_is_explained(tmp_path):
    async with endpoint(chat) as url:
        command = ("run", "--base-url", url, "--concurrency", "8", "--duration", "60s", "--json")
        code, out, _ = await bench(tmp_path, *command, key="sk-wrong")
    told = json.loads(out)
    assert code == 1
    assert told["explained"][0]["kind"] == "unauthorized"
    assert "who are you?" in told["explained"][0]["example"]
    assert "none of the first" in told["stopped"]
