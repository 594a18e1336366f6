"""Clients that leave, clients that read slowly, connections that died: the timeline of requests that went otherwise."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path

import pytest
from conformance_rig import KEY, MODEL, Bench, bench
from expectation import Expect, Played, seconds
from oracle import check_all, check_request
from oracle_marks import in_order

from loadtest.conformance.client import Answer
from loadtest.scripted.script import Script, body_of
from tracing.ledger import Outcome

SURFACES = ("chat", "completions")
FOREVER_MS = 60_000.0


def left(**changes: object) -> Expect:
    fields: dict = {
        "outcome": Outcome.CLIENT_CANCELLED,
        "attempts": (("a", "cancelled"),),
        "counted_by": None,
        "tokens": None,
        "reached": "sent",
    }
    return Expect(**(fields | changes))


async def played(b: Bench, script: Script, surface: str, stream: bool, answer: Answer, count: int = 1) -> Played:
    return Played(b, script, surface, stream, answer, await b.ledger(count), b.stage.attempts(script.id))


@pytest.mark.parametrize("surface", SURFACES)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("fallback", [False, True], ids=["", "after a fallback"])
async def test_a_client_that_leaves_before_the_first_token(
    tmp_path: Path, surface: str, stream: bool, fallback: bool
) -> None:
    upstreams, attempts = ("a",), (("a", "cancelled"),)
    if fallback:
        upstreams, attempts = ("b", "a"), (("b", "status"), ("a", "cancelled"))
    async with bench(tmp_path, upstreams=upstreams) as b:
        script = Script(id="1", prefill_ms=FOREVER_MS, headers_ms=1, end="status", only_at="b")
        answer = await b.client.leave_before_answer(
            script, lambda: b.stage.until("1", lambda w: w.upstream == "a" and w.scheduled_ns > 0),
            surface=surface, stream=stream,
        )  # fmt: skip
        await b.stage.until("1", lambda w: w.gone_ns > 0)
        p = await played(b, script, surface, stream, answer)
        b.end_waits()
        check_all(p, left(attempts=attempts), {})
        assert b.worker._state(0).inflight == dict.fromkeys(upstreams, 0)


@pytest.mark.parametrize("surface", SURFACES)
async def test_a_client_that_leaves_in_the_stream(tmp_path: Path, surface: str) -> None:
    async with bench(tmp_path) as b:
        script = Script(id="1", gap_ms=FOREVER_MS)
        answer = await b.client.ask(script, surface=surface, leave=lambda a: bool(a.token_events))
        await b.stage.until("1", lambda w: w.gone_ns > 0)
        p = await played(b, script, surface, True, answer)
        b.end_waits()
        check_all(p, left(reached="end", counted_by="events", tokens=1), {})
        # TTFT is known and stays known: the client had its first token.
        assert len(b.first_tokens(p.ledger)) == 1


@pytest.mark.parametrize("surface", SURFACES)
@pytest.mark.parametrize("end", ["leaves", "is refused in the end"])
async def test_a_client_that_waits_in_the_queue_and_never_gets_its_turn(tmp_path: Path, surface: str, end: str) -> None:
    refused = end != "leaves"
    patience_ms = 80 if refused else FOREVER_MS
    async with bench(tmp_path, max_concurrent_requests=1, queue_size=4, queue_timeout_ms=patience_ms) as b:
        running = asyncio.create_task(b.client.ask(Script(id="1", prefill_ms=FOREVER_MS)))
        await b.stage.until("1", lambda w: w.scheduled_ns > 0)
        before = b.samples()
        script = Script(id="2")
        if refused:
            answer = await b.client.ask(script, surface=surface)
        else:
            answer = await b.client.leave_before_answer(script, lambda: waiting(b), surface=surface)
        p = await played(b, script, surface, True, answer)
        assert not p.witnesses
        b.end_waits()
        outcome = (Outcome.QUEUE_REJECTED, 429) if refused else (Outcome.CLIENT_CANCELLED, 200)
        expect = left(reached="queue", attempts=(), rejected="queue_full" if refused else None)
        expect.outcome, expect.status = outcome
        check_all(p, expect, before)
        assert p.row.timeline.stages["gateway_queue"] == seconds(p.ledger.routed, p.ledger.finish)
        if refused:
            assert p.row.timeline.stages["gateway_queue"] >= 0.08
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def waiting(b: Bench) -> None:
    async with asyncio.timeout(10):
        while not b.worker._admission.waiting:
            await asyncio.sleep(0.005)


async def test_a_wait_for_room_in_the_gateway_is_its_own_stage(tmp_path: Path) -> None:
    async with bench(tmp_path, max_concurrent_requests=1, queue_size=4, queue_timeout_ms=FOREVER_MS) as b:
        first = asyncio.create_task(b.client.ask(Script(id="1", prefill_ms=40)))
        await b.stage.until("1", lambda w: w.body_read_ns > 0)
        script = Script(id="2")
        answer = await b.client.ask(script)
        await first
        one = (await b.ledger(1), await b.ledger(2))
        ended, waited = sorted(one, key=lambda ledger: ledger.ingress)
        # The place is given on as the first request ends, and not before.
        in_order(waited.routed, ended.finish, waited.admitted)
        p = Played(b, script, "chat", True, answer, waited, b.stage.attempts("2"))
        assert p.row.timeline.stages["gateway_queue"] >= seconds(waited.routed, ended.finish)


@pytest.mark.parametrize("surface", SURFACES)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_a_dead_pooled_connection_is_tried_again_and_shown_as_an_attempt(
    tmp_path: Path, surface: str, stream: bool
) -> None:
    async with bench(tmp_path) as b:
        await b.client.ask(Script(id="before"), surface=surface, stream=stream)
        await b.ledger(1)
        b.end_waits()
        before = b.samples()
        script = Script(id="1", end="drop_reused", timings="here")
        answer = await b.client.ask(script, surface=surface, stream=stream)
        p = await played(b, script, surface, stream, answer, 2)
        b.end_waits()
        check_all(p, Expect(attempts=(("a", "first_byte"), ("a", "ok")), told_by="here"), before)
        assert [(a.reused, a.connected - a.connect_start == 0) for a in p.ledger.attempts] == [
            (True, True),
            (False, False),
        ]


@pytest.mark.parametrize("surface", SURFACES)
async def test_a_slow_reader_is_back_pressure_and_not_slow_decode(tmp_path: Path, surface: str) -> None:
    """The client reads nothing until the gateway is done with the request."""
    async with bench(tmp_path) as b:
        script = Script(id="1", tokens=30, padding_bytes=24_000, gap_ms=5, usage="none")
        body = json.dumps(body_of(script, MODEL, surface, stream=True)).encode()
        path = "chat/completions" if surface == "chat" else "completions"
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
            connection.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(connection, ("127.0.0.1", b.settings.server.port))
            head = f"POST /v1/{path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
            await loop.sock_sendall(connection, f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            ledger = await b.ledger()
            b.end_waits()
            taken = b""
            while not taken.endswith(b"0\r\n\r\n"):
                taken += await loop.sock_recv(connection, 65536)
        witness = b.stage.attempts("1")[0]
        tokens = witness.token_events
        # The upstream was read at its own pace: the last token came before the client took more than a few.
        in_order(tokens[-1].last_ns, ledger.last_token, ledger.finish)
        assert ledger.token_events == 30
        assert ledger.unsent_bytes > 30 * 24_000 / 2
        decode = seconds(tokens[0].last_ns, witness.wrote("finish")[0].last_ns)
        pressed = ledger.backpressure_ns / 1e9
        assert decode / 2 < pressed <= seconds(ledger.first_token, ledger.finish)
        timeline = b.row_of(ledger).timeline
        assert timeline.after["client_backpressure"] == pressed
        assert timeline.after["streaming"] == seconds(ledger.first_token_written, ledger.upstream_end)


async def test_a_quick_reader_is_no_back_pressure(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        answer = await b.client.ask(Script(id="1"))
        ledger = await b.ledger_of(answer)
        assert (ledger.backpressure_ns, ledger.outcome) == (0, Outcome.OK)


async def test_every_request_has_its_own_marks_when_many_run_at_once(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        scripts = [Script(id=str(n), timings="here", tokens=2 + n % 4, queue_ms=n % 7) for n in range(40)]
        answers = await asyncio.gather(*(b.client.ask(script) for script in scripts))
        await b.ledger(40)
        b.end_waits()
        for script, answer in zip(scripts, answers, strict=True):
            ledger = await b.ledger_of(answer)
            p = Played(b, script, "chat", True, answer, ledger, b.stage.attempts(script.id))
            check_request(p, Expect(told_by="here", tokens=script.tokens))
        seen = b.samples()
        route = "model=m,surface=chat,upstream=a"
        for name in ("time_to_first_token", "request_duration"):
            assert seen[f"gen_ai_server_{name}_seconds_count{{{route}}}"] == 40
