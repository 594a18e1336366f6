"""The first run of a newcomer, on the demo model: sensible English through every prefix, and why it took so long."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest
from line_rig import Line, line
from openai import OpenAI

pytestmark = [pytest.mark.e2e, pytest.mark.real_model]


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Line]:
    with line(tmp_path_factory.mktemp("real"), ready_s=180) as found:
        yield found


@pytest.mark.parametrize("prefix", ["/api", "/api/v1", "/v1"])
def test_a_sensible_answer_streams_through_every_prefix(up: Line, prefix: str) -> None:
    client = OpenAI(base_url=up.origin + prefix, api_key=up.key)
    with client.chat.completions.with_streaming_response.create(
        model=up.model,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        max_tokens=40,
        temperature=0,
        stream=True,
    ) as answer:
        request_id = answer.headers["x-request-id"]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in answer.parse() if chunk.choices)
    assert "Paris" in text
    seen = up.why(request_id)
    assert abs(sum(seen["stages"].values()) + seen["unaccounted_ms"] - seen["ttft_ms"]) < 0.01
    assert abs(seen["unaccounted_ms"]) <= max(0.02 * seen["ttft_ms"], 1.0)
    assert seen["stages"]["engine_prefill"] > 0.5 * seen["ttft_ms"]


def test_the_second_start_is_quick(up: Line, tmp_path_factory: pytest.TempPathFactory) -> None:
    began = time.monotonic()
    with line(tmp_path_factory.mktemp("again"), ready_s=30) as again:
        assert again.model == up.model
    assert time.monotonic() - began < 60


def test_a_load_test_of_the_model_has_exact_lengths_and_every_stage(up: Line) -> None:
    up.environ |= {"TOKENLINE_API_KEY": up.key, "TOKENLINE_OPS_URL": up.ops_url}
    load = ("--concurrency", "4", "--prompt-tokens", "64", "--max-output-tokens", "16", "--duration", "12s")
    done = up.tokenline("bench", "run", "--base-url", up.base_url, *load, "--ignore-eos", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["prompt_lengths"] == "exact, by the endpoint's /tokenize"
    (stage,) = told["stages"]
    assert (stage["concurrency"], stage["errors"]) == (4, 0)
    for name, tokens in (("prompt_tokens", 64), ("output_tokens", 16)):
        assert (stage[name]["p50"], stage[name]["max"]) == (tokens, tokens)
    assert stage["tps"] > 0
    stages = stage["server_stages_ms"]
    assert {"auth", "engine_queue", "engine_prefill", "engine_decode", "client_link"} <= stages.keys()
    assert stages["engine_prefill"]["count"] == stage["ttft_ms"]["count"] > 0
