"""The whole line on the simulated device: what users and operators see of a request, against the known truth."""

from __future__ import annotations

import json
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from anthropic import Anthropic
from line_rig import Line, line
from openai import BadRequestError, OpenAI

FORWARD_MS = 20.0


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Line]:
    tmp_path = tmp_path_factory.mktemp("line")
    with line(tmp_path, "--device", "simulated", TOKENLINE_SIMULATED__FORWARD_MS=str(FORWARD_MS)) as found:
        yield found


@pytest.mark.parametrize("prefix", ["/api", "/api/v1", "/v1"])
def test_the_openai_client_needs_only_base_url_and_key(up: Line, prefix: str) -> None:
    client = OpenAI(base_url=up.origin + prefix, api_key=up.key, max_retries=0)
    stream = client.chat.completions.create(
        model=up.model, messages=[{"role": "user", "content": "hi"}], max_tokens=5, stream=True
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert len(text) == 5
    whole = client.chat.completions.create(model=up.model, messages=[{"role": "user", "content": "hi"}], max_tokens=3)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 3
    assert [model.id for model in client.models.list()] == [up.model]


def test_the_anthropic_client_and_responses_are_served_by_the_engine_with_its_own_timeline(up: Line) -> None:
    messages = Anthropic(base_url=up.origin + "/api", api_key=up.key, max_retries=0).messages
    asked: dict[str, Any] = {"model": up.model, "messages": [{"role": "user", "content": "hi"}]}
    more: dict[str, Any] = {"system": "s", "metadata": {"user_id": "u"}, "stop_sequences": ["\u0001"]}
    with messages.stream(**asked, **more, max_tokens=5) as events:
        final = events.get_final_message()
    assert final.content[0].type == "text"
    assert (len(final.content[0].text), final.stop_reason, final.usage.output_tokens) == (5, "max_tokens", 5)
    assert messages.count_tokens(**asked, system="s").input_tokens == final.usage.input_tokens
    found = up.why(str(events.request_id))
    assert found["surface"] == "messages"
    assert "engine_prefill" in json.dumps(found)

    client = OpenAI(base_url=up.origin + "/api", api_key=up.key, max_retries=0)
    with client.responses.stream(model=up.model, input="hi", instructions="s", max_output_tokens=4) as answers:
        kinds = [found.type for found in answers]
    assert kinds.count("response.output_text.delta") == 4
    assert kinds[-1] == "response.incomplete"
    whole = client.responses.create(model=up.model, input="hi", max_output_tokens=3, user="u")
    assert len(whole.output_text) == 3
    with pytest.raises(BadRequestError, match="does not speak it"):
        client.embeddings.create(model=up.model, input="hi")


def timed_stream(up: Line, tokens: int, prompt: str = "hi") -> tuple[str, float, float]:
    """(request id, TTFT ms, TPOT ms) as the client sees them."""
    body = {
        "model": up.model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "stream": True,
    }
    began = time.perf_counter()
    arrivals = []
    with up.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        arrivals.extend(
            time.perf_counter() for text in answer.iter_lines() if '"content"' in text and '"content":""' not in text
        )
        request_id = answer.headers["x-request-id"]
    tpot = (arrivals[-1] - arrivals[0]) / (len(arrivals) - 1)
    assert len(arrivals) == tokens
    return request_id, (arrivals[0] - began) * 1e3, tpot * 1e3


def test_client_gateway_and_truth_agree_on_ttft_and_tpot(up: Line) -> None:
    """The truth of a decode step is forward_ms and the gap before it, which the engine measures on its own."""
    timed_stream(up, 3)
    gaps_before = gap_sum_and_count(up)
    ours, theirs = [], []
    for _ in range(5):
        request_id, ttft_ms, tpot_ms = timed_stream(up, 40)
        seen = up.why(request_id)
        ours.append((seen["ttft_ms"], seen["tpot_ms"]))
        theirs.append((ttft_ms, tpot_ms))
        assert seen["tokens"]["output"] == 40
    gap_s, gaps = (after - before for after, before in zip(gap_sum_and_count(up), gaps_before, strict=True))
    our_ttft, their_ttft = (min(ttft for ttft, _ in side) for side in (ours, theirs))
    our_tpot, their_tpot = (statistics.mean(tpot for _, tpot in side) for side in (ours, theirs))
    assert abs(our_ttft - their_ttft) < 5
    assert abs(our_ttft - FORWARD_MS) < 5
    assert abs(our_tpot - their_tpot) < 0.02 * FORWARD_MS
    assert gaps == 5 * 39
    assert abs(our_tpot - (FORWARD_MS + gap_s / gaps * 1e3)) < 0.02 * FORWARD_MS


def gap_sum_and_count(up: Line) -> tuple[float, float]:
    """The engine's token gaps so far: seconds, how many."""
    return up.metric("tokenline_engine_token_gap_seconds_sum"), up.metric("tokenline_engine_token_gap_seconds_count")


def test_why_gives_stages_that_sum_to_ttft(up: Line) -> None:
    request_id, _, _ = timed_stream(up, 5)
    seen = up.why(request_id)
    wanted = {
        "request_id", "trace_id", "model", "upstream", "outcome", "ttft_ms", "tpot_ms", "e2e_ms", "stages",
        "unaccounted_ms", "engine",
    }  # fmt: skip
    assert wanted <= set(seen)
    assert abs(sum(seen["stages"].values()) + seen["unaccounted_ms"] - seen["ttft_ms"]) < 0.01
    assert abs(seen["unaccounted_ms"]) <= max(0.02 * seen["ttft_ms"], 1.0)
    assert {"running", "waiting", "kv_usage", "batch"} <= set(seen["engine"])
    assert abs(seen["stages"]["engine_prefill"] - FORWARD_MS) < 3
    assert seen["placement"] == "exact"
    assert (seen["outcome"], seen["upstream"]) == ("ok", "engine")
    by_trace = up.why(seen["trace_id"])
    assert by_trace["request_id"] == seen["request_id"]


def test_the_engines_spans_are_in_the_requests_trace_and_name_it_as_the_gateway_does(up: Line) -> None:
    answer = up.chat(max_tokens=3)
    request_id = answer.headers["x-tokenline-request-id"]
    admin_key = (Path(up.environ["TOKENLINE_STATE_DIR"]) / "admin-key").read_text().strip()
    deadline = time.monotonic() + 10
    while True:
        found = httpx.get(
            f"{up.ops_url}/admin/v1/requests/{request_id}",
            params={"spans": True},
            headers={"authorization": f"Bearer {admin_key}"},
        )
        spans = found.json()["matches"][0]["spans"] if found.status_code == 200 else []
        emitted = [
            span for span in spans if span["name"] == "llm_request" and not span["attributes"].get("tokenline.derived")
        ]
        if emitted:
            break
        assert time.monotonic() < deadline, found.text
        time.sleep(0.1)
    assert [span["attributes"]["tokenline.request_id"] for span in emitted] == [request_id]
    attempt = next(span for span in spans if span["span_id"] == emitted[0]["parent_id"])
    assert attempt["name"] == f"chat {up.model}"


def test_a_whole_answer_has_no_ttft_and_stages_that_sum_to_its_duration(up: Line) -> None:
    answer = up.chat(max_tokens=10)
    seen = up.why(answer.headers["x-request-id"])
    assert seen["ttft_ms"] is None
    assert abs(seen["engine_ttft_ms"] - FORWARD_MS) < 5
    assert abs(sum(seen["stages"].values()) + seen["unaccounted_ms"] - seen["e2e_ms"]) < 0.01
    assert abs(seen["unaccounted_ms"]) <= max(0.02 * seen["e2e_ms"], 1.0)
    assert abs(seen["stages"]["engine_decode"] - 9 * FORWARD_MS) < 10


def test_eight_requests_at_once_are_in_one_batch(up: Line) -> None:
    before = up.metric("tokenline_engine_batch_size_bucket", le="4.0")
    before_all = up.metric("tokenline_engine_batch_size_count")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: timed_stream(up, 30), range(8)))
    steps = up.metric("tokenline_engine_batch_size_count") - before_all
    small = up.metric("tokenline_engine_batch_size_bucket", le="4.0") - before
    assert steps - small >= 20
    assert steps < 8 * 30 / 2


def test_metrics_are_one_page_in_both_formats(up: Line) -> None:
    timed_stream(up, 3)
    up.until_metric(1, "gen_ai_server_time_to_first_token_seconds_count", model=up.model)
    page = up.metrics()
    assert "tokenline_engine_token_gap_seconds_bucket" in page
    assert 'simulated="true"' in page
    assert "_created" not in page
    open_page = up.metrics(openmetrics=True)
    assert open_page.count("# EOF") == 1
    assert open_page.endswith("# EOF\n")
    assert '# {trace_id="' in open_page


def raw_request(up: Line, stream: bool, tokens: int) -> socket.socket:
    body = json.dumps(
        {
            "model": up.model,
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": tokens,
            "stream": stream,
        }
    ).encode()
    host, port = up.origin.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    connection.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nContent-Length: %d\r\n\r\n%s"
        % (up.key.encode(), len(body), body)
    )
    return connection


@pytest.mark.parametrize("case", ["before the first token", "in the stream", "on a whole answer"])
def test_a_client_that_leaves_frees_slot_and_pages(up: Line, case: str) -> None:
    cancelled = up.metric("tokenline_requests_total", outcome="client_cancelled")
    connection = raw_request(up, stream=case != "on a whole answer", tokens=5000)
    if case == "in the stream":
        connection.recv(10)
    else:
        up.until_metric(1, "tokenline_engine_num_requests_running", wait_s=3)
    connection.close()
    deadline = time.monotonic() + 2
    while up.metric("tokenline_engine_num_requests_running") or up.metric("tokenline_engine_kv_cache_usage_ratio"):
        assert time.monotonic() < deadline, "the engine still holds the request"
        time.sleep(0.01)
    up.until_metric(cancelled + 1, "tokenline_requests_total", outcome="client_cancelled")
    up.until_metric(1, "tokenline_engine_request_success_total", finished_reason="abort")


@pytest.mark.parametrize(
    ("change", "status", "code"),
    [
        ({"max_tokens": -1}, 400, None),
        ({"messages": []}, 400, None),
        ({"messages": [{"role": "user", "content": "x" * 40_000}]}, 400, "context_length_exceeded"),
        ({"temperature": 9}, 400, None),
        ({"model": "smulated"}, 404, "model_not_found"),
    ],
)
def test_bad_requests_are_told_what_is_wrong(up: Line, change: dict, status: int, code: str | None) -> None:
    answer = up.chat(**change)
    error = answer.json()["error"]
    assert answer.status_code == status, error
    assert code is None or error["code"] == code
    assert error["message"]
    assert error["request_id"] == answer.headers["x-tokenline-request-id"]


def test_a_body_of_50_mb_is_refused(up: Line) -> None:
    answer = up.client.post("/v1/chat/completions", content=b" " * 50_000_000)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


def test_keys_are_made_listed_used_and_revoked(up: Line) -> None:
    made = json.loads(up.tokenline("keys", "create", "--alias", "app", "--json").stdout)
    listed = up.tokenline("keys", "list").stdout
    assert "app" in listed
    assert made["secret"] not in listed
    models = httpx.get(up.base_url + "/v1/models", headers={"x-api-key": made["secret"]})
    assert models.status_code == 200
    assert up.tokenline("keys", "revoke", "app").returncode == 0
    deadline = time.monotonic() + 5.5
    while (answer := httpx.get(up.base_url + "/v1/models", headers={"x-api-key": made["secret"]})).status_code == 200:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert answer.json()["error"]["code"] == "revoked_key"


def test_kill_9_of_the_observer_under_load_fails_no_request(up: Line) -> None:
    ended = threading.Event()
    statuses: list[int] = []

    def load() -> None:
        with httpx.Client(headers={"authorization": f"Bearer {up.key}"}, timeout=30) as client:
            body = {"model": up.model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
            while not ended.is_set():
                statuses.append(client.post(up.base_url + "/v1/chat/completions", json=body).status_code)

    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(load) for _ in range(4)]
        for _ in range(2):
            time.sleep(1)
            up.child("observer").kill()
            deadline = time.monotonic() + 15
            while True:
                try:
                    if httpx.get(up.ops_url + "/readyz", timeout=1).status_code == 200:
                        break
                except httpx.HTTPError:
                    pass
                assert time.monotonic() < deadline, "the observer did not come back"
                time.sleep(0.1)
        time.sleep(1)
        ended.set()
        for task in running:
            task.result()
    assert set(statuses) == {200}
    assert len(statuses) > 50
    count = up.until_metric(1, "tokenline_requests_total", outcome="ok")
    timed_stream(up, 3)
    up.until_metric(count + 1, "tokenline_requests_total", outcome="ok")


def test_a_request_that_is_given_up_still_has_stages_that_sum_to_its_time(tmp_path: Path) -> None:
    limits = {"TOKENLINE_SERVER__FIRST_BYTE_TIMEOUT_SECONDS": "0.3", "TOKENLINE_SIMULATED__FORWARD_MS": "1500"}
    with line(tmp_path, "--device", "simulated", **limits) as slow:
        answer = slow.chat(max_tokens=2)
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "upstream_timeout")
        request_id = answer.headers["x-request-id"]
        deadline = time.monotonic() + 10
        while "engine_prefill" not in (seen := slow.why(request_id))["stages"]:
            assert time.monotonic() < deadline, seen
            time.sleep(0.2)
        assert seen["placement"] == "exact"
        assert abs(sum(seen["stages"].values()) + seen["unaccounted_ms"] - seen["e2e_ms"]) < 0.01
        assert min(seen["stages"].values()) >= 0
        assert seen["stages"]["engine_prefill"] < 310
