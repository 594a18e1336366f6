"""A sampling, and live traffic after it: `bench compare A --live` tells whether the engine or the traffic changed."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from line_rig import Line, line

pytestmark = pytest.mark.e2e
STARTING_S = 4
"""For the command to come up, which is a part of the window that it asks for."""
PROMPT = "Tell me something about the sea, the sky and the land between them, please. "


def users(up: Line, requests: int, *, at_once: int, first: int) -> None:
    """Users who are no load test, `at_once` together. Prompts begin with numbers from `first` on: no cache has them."""

    def ask(number: int) -> None:
        text = f"{number} {PROMPT}"
        body = {"model": up.model, "messages": [{"role": "user", "content": text}], "max_tokens": 12, "stream": True}
        answer = up.client.post("/v1/chat/completions", json={**body, "ignore_eos": True})
        assert answer.status_code == 200, answer.text

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(ask, range(first, first + requests)))


def compared(up: Line, began: float) -> dict[str, Any]:
    window = f"{int(time.time() - began) + STARTING_S}s"
    done = up.tokenline("bench", "compare", "last", "--live", window, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_an_engine_that_got_slower_is_told_from_longer_prompts(tmp_path):
    def start(forward_ms: int) -> Any:
        return line(
            tmp_path,
            "--device",
            "simulated",
            TOKENLINE_SIMULATED__FORWARD_MS=str(forward_ms),
            TOKENLINE_SIMULATED__PREFILL_TOKEN_US="400",
        )

    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": f"{1000 + n} {PROMPT}"}) for n in range(40)))
    with start(20) as up:
        up.environ |= {"TOKENLINE_API_KEY": up.key, "TOKENLINE_OPS_URL": up.ops_url}
        sample = ("bench", "sample", "-n", "40", "--prompts", str(prompts), "--max-output-tokens", "12", "--ignore-eos")
        assert up.tokenline(*sample, "--base-url", up.base_url).returncode == 0

        began = time.time()
        users(up, 40, at_once=1, first=2000)
        alike = compared(up, began)
        assert alike["layers"]["engine"]["state"] == "unchanged", alike["layers"]
        assert alike["layers"]["model"]["state"] == "unchanged"
        assert alike["verdict"]["cause"] in ("none", "link", "gateway"), alike["verdict"]
        assert alike["live"]["requests"] >= 30

        time.sleep(STARTING_S)  # so that the window holds only what follows
        began = time.time()
        users(up, 120, at_once=6, first=3000)
        busier = compared(up, began)
        assert busier["layers"]["traffic"]["state"] == "changed", busier["layers"]

    with start(34) as up:
        up.environ |= {"TOKENLINE_OPS_URL": up.ops_url}
        began = time.time()
        users(up, 40, at_once=1, first=4000)
        slower = compared(up, began)
        assert slower["layers"]["engine"]["state"] == "changed", slower["layers"]
        assert slower["layers"]["traffic"]["state"] == "unchanged", slower["layers"]
        assert slower["verdict"]["cause"] == "engine", slower["verdict"]
        shown = up.tokenline("bench", "compare", "last", "--live", "60s")
        # In this minute there was more traffic too.
        assert "Changed: traffic, engine." in shown.stdout, shown.stdout
