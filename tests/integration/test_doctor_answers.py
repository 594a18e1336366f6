"""The doctor at whole answers, streams, and streams that somebody holds back."""

from __future__ import annotations

import pytest
from aiohttp import web
from doctor_rig import (
    DONE,
    KEY,
    QUICK,
    Handler,
    Server,
    chunk,
    counted,
    cut,
    doctor,
    event,
    in_front_of,
    listening,
    never,
    page,
    refusal,
    said,
    send,
    streamed,
)  # fmt: skip

USAGE = {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2}}


@pytest.mark.parametrize(
    ("answer", "troubles"),
    [
        (said({"choices": []}), ["choices_empty"]),
        (said({"choices": [{"message": {"content": None}}]}), ["answer_without_text"]),
        (said({"choices": [{"message": {"content": "", "reasoning_content": "hm"}}]}), []),
        (said({"result": "hello"}), ["answer_wrong_shape"]),
        (said({"error": {"message": "no"}}), ["answer_error_in_200"]),
        (said([1]), ["answer_not_json"]),
        (page(), ["answer_html"]),
        (page(504), ["answer_html"]),
        (refusal(500, "it failed"), ["server_failed"]),
        (refusal(400, "no such field"), ["answer_refused"]),
        (refusal(401, "no key"), ["auth_refused"]),
        (refusal(403, "model m is not allowed"), ["model_forbidden"]),
        (refusal(404, "no such model"), ["model_unknown"]),
        (refusal(429, "slow down"), ["auth_limited"]),
        (never, ["answer_timeout"]),
        (cut, ["answer_broken"]),
    ],
)
async def test_a_whole_answer_is_judged(answer: Handler, troubles: list[str]) -> None:
    async with Server().serving() as server:
        server.whole, server.stream = answer, streamed(*QUICK)
        seen = await doctor(f"{server.origin}/v1", timeout_s=0.5)
    assert seen.troubles == troubles
    assert seen.codes("auth") == ([code for code in troubles if code.startswith("auth")] or ["auth_accepted"])


async def test_a_model_that_knows_only_the_newer_limit_is_asked_with_it() -> None:
    async def newer(request: web.Request) -> web.StreamResponse:
        fields = await request.json()
        if "max_tokens" in fields:
            return await refusal(400, "Use 'max_completion_tokens' instead of 'max_tokens'.")(request)
        return await (streamed(*QUICK) if fields["stream"] else said({"choices": [{"message": {"content": "a"}}]}))(
            request
        )

    async with Server().serving() as server:
        server.whole = server.stream = newer
        seen = await doctor(f"{server.origin}/v1")
    assert seen.troubles == []


@pytest.mark.parametrize(
    ("events", "troubles"),
    [
        (said({"choices": [{"message": {"content": "a"}}]}), ["stream_not_sse"]),
        (streamed(event({"choices": [], "prompt_filter_results": []}), *QUICK), ["stream_first_empty"]),
        (streamed(*QUICK[:-1], event(USAGE), DONE), ["stream_usage_unasked"]),
        (streamed(chunk("a"), event({"choices": []}), *QUICK), ["stream_some_empty"]),
        (streamed(*[event({"choices": []})] * 3, DONE), ["stream_choices_empty"]),
        (streamed(chunk(""), chunk(None, "stop"), DONE), ["stream_without_text"]),
        (streamed(DONE), ["stream_no_events"]),
        (streamed(*QUICK[:-1]), ["stream_no_end"]),
        (streamed(chunk("a"), event({"error": {"message": f"bad {KEY}"}})), ["stream_error"]),
        (cut, ["stream_broken"]),
        (refusal(500, "no streams"), ["server_failed"]),
    ],
)
async def test_the_events_of_a_stream_are_judged(events: Handler, troubles: list[str]) -> None:
    async with Server().serving() as server:
        server.stream = events
        seen = await doctor(f"{server.origin}/v1")
    assert seen.troubles == troubles


async def test_a_compressed_stream_is_named() -> None:
    async def squeezed(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        response.enable_compression(web.ContentCoding.gzip)
        await response.prepare(request)
        for piece in QUICK:
            if isinstance(piece, bytes):
                await response.write(piece)
        return response

    async with Server().serving() as server:
        server.stream = squeezed
        seen = await doctor(f"{server.origin}/v1")
    assert "stream_compressed" in seen.troubles


async def test_a_layer_that_buffers_is_found_by_a_shorter_answer_that_comes_sooner() -> None:
    async with Server().serving() as server, listening(in_front_of(server.origin)) as origin:
        seen = await doctor(f"{origin}/v1")
    assert seen.troubles == ["events_held_back"]
    assert seen["events_held_back"].values["server"] == "nginx"
    assert set(server.limits) == {48, 12}


async def test_a_layer_that_buffers_is_found_by_the_engine_s_own_times() -> None:
    async def timed(request: web.Request) -> web.StreamResponse:
        last = chunk(None, "length", timings={"predicted_n": 48, "predicted_ms": 376.0})
        return await send(request, *counted(48)[:-2], last, DONE)

    async with Server().serving() as server, listening(in_front_of(server.origin)) as origin:
        server.stream = timed
        seen = await doctor(f"{origin}/v1")
    assert seen.troubles == ["events_at_once"]
    assert seen["events_at_once"].values["decode_ms"] == 376
    assert set(server.limits) == {48}


async def test_a_buffer_that_fills_shows_as_clumps() -> None:
    clumps = [piece for number in range(4) for piece in (0.1, b"".join([chunk("a")] * 10))]
    async with Server().serving() as server:
        server.stream = streamed(*clumps, chunk(None, "stop"), DONE)
        seen = await doctor(f"{server.origin}/v1")
    assert seen.troubles == ["events_in_pieces"]
    assert seen["events_in_pieces"].values["clumps"] == 4


@pytest.mark.parametrize(
    ("pieces", "code"),
    [
        ([chunk(f"{n}") for n in range(40)], "spacing_too_fast"),
        ([chunk("a"), chunk("b")], "spacing_too_few"),
    ],
)
async def test_where_the_rhythm_tells_nothing_the_doctor_says_so(pieces: list[bytes], code: str) -> None:
    async with Server().serving() as server:
        server.stream = streamed(b"".join(pieces), chunk(None, "stop"), DONE)
        seen = await doctor(f"{server.origin}/v1")
    assert (seen.troubles, seen.codes("buffering")) == ([], [code])
