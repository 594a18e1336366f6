"""Load tests of endpoints that misbehave: each fault is counted and explained, and the run always ends."""

from __future__ import annotations

import asyncio
import time
from typing import ClassVar

import pytest
from aiohttp import web
from bench_rig import DONE, endpoint, event, kinds, load, streamed, usage
from line_rig import free_ports

from loadtest.client import LONGEST_PAUSE_S, _retry_after
from loadtest.endpoint import NotAnswered, open_session
from loadtest.page import find_page
from settings.errors import SettingsError

GOOD = (event("a"), event("b"), event(finish="stop"), usage(64, 2), DONE)


def always(*pieces: bytes | float, **how: str):
    async def chat(request: web.Request) -> web.StreamResponse:
        await request.read()
        return await streamed(request, *pieces, **how)

    return chat


def answering(status: int, text: str, **headers: str):
    async def chat(request: web.Request) -> web.StreamResponse:
        await request.read()
        return web.Response(status=status, text=text, headers=headers)

    return chat


@pytest.mark.parametrize(
    ("chat", "kind", "example"),
    [
        (answering(401, '{"error": "bad key"}'), "unauthorized", "401"),
        (answering(404, "no such model"), "not_found", "no such model"),
        (answering(429, "full"), "refused", "429 full"),
        (answering(422, "max_tokens"), "bad_request", "422 max_tokens"),
        (answering(503, "down"), "server_error", "503"),
        (answering(200, "<html>login</html>"), "not_sse", "<html>login</html>"),
        (always(event("a"), b"data: {nonsense\n\n", DONE), "bad_event", "{nonsense"),
        (always(event("a"), b'data: {"error": {"message": "boom"}}\n\n'), "error_event", "boom"),
        (always(event("a"), event("b")), "cut_short", "after 2 events"),
        (always(event(finish="stop"), DONE), "no_tokens", "neither"),
        (always(b"data: {}\n\n", DONE), "no_tokens", "neither"),
    ],
)
async def test_a_fault_is_counted_and_explained(chat, kind, example):
    async with endpoint(chat) as url:
        run = await load(url)
    found = kinds(run)
    assert set(found) == {kind}
    assert example in found[kind]["example"]
    assert found[kind]["count"] == run["stages"][0]["errors_by_kind"][kind] == run["stages"][0]["errors"] >= 2
    assert run["stages"][0]["ttft_ms"]["count"] == 0
    assert run["stages"][0]["rps"] == 0
    assert set(run["requests"]["error"]) == {kind}


async def test_a_stream_that_never_ends_times_out_and_the_run_ends():
    async def chat(request: web.Request) -> web.StreamResponse:
        return await streamed(request, *[event("a"), 0.05] * 1000)

    async with endpoint(chat) as url:
        began = time.monotonic()
        run = await load(url, api__timeout_seconds=0.5, load_test__duration_seconds=0.6)
    assert time.monotonic() - began < 10
    found = kinds(run)
    assert set(found) == {"timeout"}
    assert "in the stream, after" in found["timeout"]["example"]
    assert run["stages"][0]["tps"] > 5


async def test_a_server_that_never_answers_times_out_before_any_answer():
    async with endpoint(always(60.0)) as url:
        run = await load(url, api__timeout_seconds=0.3)
    assert "before" in kinds(run)["timeout"]["example"]


async def test_a_lost_connection_is_told():
    async def chat(request: web.Request) -> web.StreamResponse:
        response = await streamed(request, event("a"))
        assert request.transport is not None
        request.transport.abort()
        return response

    async with endpoint(chat) as url:
        run = await load(url, api__max_retries=3)
    assert set(kinds(run)) <= {"broken_stream"}
    assert kinds(run)["broken_stream"]["count"] >= 2


async def test_nobody_there_is_told_before_the_run_without_a_model_and_in_it_with_one():
    url = f"http://127.0.0.1:{free_ports(1)[0]}/v1"
    with pytest.raises(NotAnswered, match="can't be reached"):
        await load(url)
    run = await load(url, api__model="m")
    assert set(kinds(run)) == {"unreachable"}
    assert run["stages"][0]["errors"] >= 2


async def test_one_of_several_models_must_be_named():
    async with endpoint(always(*GOOD), models=("a", "b")) as url:
        with pytest.raises(SettingsError, match="serves 2 models; name one with --model: a, b"):
            await load(url)
        assert (await load(url, api__model="b"))["model"] == "b"


async def test_events_cut_anywhere_and_several_tokens_in_one_are_counted_by_usage():
    whole = (
        b": hello\r\n\r\n"
        + event("\u4f60\u597d").replace(b"\n", b"\r\n")
        + event("b", finish="stop")
        + usage(64, 7)
        + DONE
    )
    pieces: list[bytes | float] = []
    for start in range(0, len(whole), 17):
        pieces += [whole[start : start + 17], 0.001]
    async with endpoint(always(*pieces)) as url:
        run = await load(url)
    assert not kinds(run)
    assert run["token_counts"] == "usage"
    assert set(run["requests"]["output_tokens"]) == {7}
    assert set(run["requests"]["token_events"]) == {2}
    assert "several_tokens_in_an_event" in kinds(run, "oddity")
    assert run["stages"][0]["tpot_ms"]["p50"] < run["stages"][0]["gap_ms"]["p50"] / 2


async def test_without_usage_and_without_done_events_are_counted_and_it_is_said():
    async with endpoint(always(event(""), 0.02, event("a"), 0.03, event("b"), event(finish="length"))) as url:
        run = await load(url)
    assert not kinds(run)
    assert run["token_counts"] == "events"
    assert set(run["requests"]["output_tokens"]) == {2}
    assert set(kinds(run, "oddity")) == {"no_usage", "no_done"}
    # The empty first event is no token.
    assert run["stages"][0]["ttft_ms"]["p50"] >= 20


async def test_without_usage_an_endpoint_with_a_tokenizer_counts_what_was_said():
    async with endpoint(
        always(event("one two "), 0.02, event("three four"), event(finish="stop"), DONE), counts_words=True
    ) as url:
        run = await load(url)
    assert not kinds(run)
    assert run["token_counts"] == "the endpoint's /tokenize"
    assert run["prompt_lengths"] == "exact, by the endpoint's /tokenize"
    assert set(run["requests"]["output_tokens"]) == {4}
    assert set(run["requests"]["token_events"]) == {2}


async def test_retries_are_made_counted_and_part_of_the_time():
    asked = 0

    async def chat(request: web.Request) -> web.StreamResponse:
        nonlocal asked
        await request.read()
        asked += 1
        return await streamed(request, *GOOD) if asked % 2 == 0 else web.Response(status=503, text="busy")

    async with endpoint(chat) as url:
        run = await load(url, api__max_retries=3, load_test__concurrency=1, load_test__duration_seconds=1.2)
    assert not kinds(run)
    stage = run["stages"][0]
    assert stage["retries"] == stage["retried_requests"] == stage["requests"]
    assert stage["ttft_ms"]["p50"] > 100
    assert kinds(run, "retry")["retried: server_error"]["count"] >= stage["retries"]


async def test_stopping_by_hand_keeps_what_there_is():
    stop_at = time.monotonic() + 1.0
    async with endpoint(always(event("a"), 0.1, *GOOD)) as url:
        run = await load(
            url, load_test__duration_seconds=600, stopped=lambda: time.monotonic() > stop_at, load_test__concurrency=4
        )
    assert run["stopped"] == "it was stopped by hand"
    stage = run["stages"][0]
    assert stage["ttft_ms"]["count"] > 8
    assert stage["counted_seconds"] < 20
    assert set(run["requests"]["error"]) <= {None, "unfinished"}


async def test_whole_answers_have_no_ttft():
    async def chat(request: web.Request) -> web.StreamResponse:
        assert (await request.json())["stream"] is False
        await asyncio.sleep(0.03)
        answer = {"choices": [{"index": 0, "message": {"content": "hi"}, "finish_reason": "stop"}]}
        return web.json_response({**answer, "usage": {"prompt_tokens": 64, "completion_tokens": 5}})

    async with endpoint(chat) as url:
        run = await load(url, workload__stream=False)
    assert not kinds(run)
    stage = run["stages"][0]
    assert stage["ttft_ms"]["count"] == stage["tpot_ms"]["count"] == 0
    assert stage["e2e_ms"]["p50"] >= 30
    assert stage["tps"] == pytest.approx(5 * stage["rps"], rel=0.01)


async def test_an_open_loop_shows_what_waiting_for_room_cost():
    """100 ms of service, one at a time, 20 a second: the schedule runs away from what is sent."""
    async with endpoint(always(0.1, *GOOD)) as url:
        run = await load(
            url, load_test__concurrency=1, load_test__request_rate=20, load_test__arrival="constant",
            load_test__duration_seconds=1.0,
        )  # fmt: skip
    stage = run["stages"][0]
    assert stage["requests"] == 20
    assert not stage["errors"]
    assert stage["ttft_from_sent_ms"]["p50"] < 300
    assert stage["ttft_ms"]["p99"] > stage["ttft_from_sent_ms"]["p99"] + 400
    assert stage["client"]["sent_late_ms"]["max"] > 500


async def test_figures_of_the_engines_page_are_sampled_and_approximate_lengths_admitted():
    page = '# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{model_name="m"} 3\n'
    async with endpoint(always(0.05, *GOOD), pages={"/metrics": page}) as url:
        run = await load(url, metrics__collect_gpu_util=True, load_test__duration_seconds=0.6)
    assert run["stages"][0]["engine"] == {"running": 3.0}
    assert run["metrics_url"].endswith("/metrics")
    assert all(sample["running"] == 3 for sample in run["samples"])
    assert run["prompt_lengths"].startswith("approximate")
    assert any("approximate" in note for note in run["notes"])


async def test_the_page_of_an_ops_listener_is_taken_where_the_endpoint_has_none_and_is_on_the_same_host():
    page = {"/metrics": "tokenline_engine_busy_ratio 0.5\n"}
    async with endpoint(always(*GOOD)) as url, endpoint(always(*GOOD), pages=page) as ops, open_session() as http:
        ops_url = ops.removesuffix("/v1")
        found = await find_page(url, None, http, ops_url)
        assert found is not None
        assert found.url == ops_url + "/metrics"
        elsewhere = await find_page(url, None, http, ops_url.replace("127.0.0.1", "localhost"))
        assert elsewhere is None or elsewhere.url != ops_url + "/metrics"
        own = await find_page(ops, None, http, url.removesuffix("/v1"))
        assert own is not None
        assert own.url == ops_url + "/metrics"


@pytest.mark.parametrize("wish", ["nan", "-inf", "inf", "soon", "-3"])
def test_a_wish_to_wait_that_is_no_number_of_seconds_is_waited_for_at_most_briefly(wish: str) -> None:
    class Refusal:
        headers: ClassVar = {"retry-after": wish}

    assert _retry_after(Refusal()) in (0.0, LONGEST_PAUSE_S)  # type: ignore[arg-type]
