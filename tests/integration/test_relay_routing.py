"""Many upstreams behind one name: dead, frozen, busy or equal, and no request fails that had not begun to stream."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest
from aiohttp import web
from gateway_rig import DONE, chunk, rig, stream, whole

from gateway.upstreams import health
from tracing.ledger import Outcome

OK = {"choices": [{"message": {"content": "x"}, "finish_reason": "stop"}]}


async def test_load_is_shared_and_each_answer_says_by_whom(tmp_path: Path) -> None:
    async with rig(tmp_path, names=("a", "b")) as r:
        for upstream in r.upstreams.values():
            upstream.script = stream(0.05, chunk("x", finish="stop"), DONE)
        answers = await asyncio.gather(*(r.chat(stream=True) for _ in range(20)))
        served = Counter(answer.headers["x-tokenline-upstream"] for answer in answers)
        assert min(served["a"], served["b"]) >= 6


async def test_an_upstream_that_dies_under_load_fails_no_request_and_its_breaker_opens_and_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "INTERVAL_SECONDS", 0.1)

    async def dies(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async with rig(tmp_path, names=("a", "b"), health_path="/models") as r:
        for upstream in r.upstreams.values():
            upstream.script = stream(0.01, chunk("x", finish="stop"), DONE)
        await asyncio.gather(*(r.chat(stream=True) for _ in range(10)))
        r.upstreams["a"].script = dies
        for _ in range(6):
            answers = await asyncio.gather(*(r.chat(stream=True) for _ in range(6)))
            assert {answer.status_code for answer in answers} == {200}
        assert r.worker._state(0).breakers["a"] != 0
        r.upstreams["a"].script = stream(0.01, chunk("x", finish="stop"), DONE)
        async with asyncio.timeout(10):
            while r.worker._state(0).breakers["a"] != 0:
                await r.chat(stream=True)
                await asyncio.sleep(0.05)
        ledgers = await r.observer.closed(46)
        failed = [a for ledger in ledgers for a in ledger.attempts if a.error]
        assert failed
        assert {ledger.outcome for ledger in ledgers} == {Outcome.OK}


async def test_requests_that_wait_at_an_upstream_that_freezes_go_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "INTERVAL_SECONDS", 0.1)
    monkeypatch.setattr(health, "TIMEOUT_SECONDS", 0.2)
    async with rig(tmp_path, names=("a", "b"), health_path="/models") as r:
        r.upstreams["a"].script = stream(60.0)
        r.upstreams["a"].is_frozen = True
        r.upstreams["b"].script = stream(chunk("x", finish="stop"), DONE)
        async with asyncio.timeout(10):
            answers = await asyncio.gather(*(r.chat(stream=True) for _ in range(6)))
        assert {answer.status_code for answer in answers} == {200}
        struck = [a for ledger in await r.observer.closed(6) for a in ledger.attempts if a.error == "health"]
        assert struck
        assert {a.upstream for a in struck} == {"a"}
        assert r.worker._state(0).breakers["a"] == 2
        r.upstreams["a"].is_frozen = False
        r.upstreams["a"].script = stream(chunk("x", finish="stop"), DONE)
        async with asyncio.timeout(10):
            while r.worker._state(0).breakers["a"] != 0:
                await r.chat(stream=True)
                await asyncio.sleep(0.05)


async def test_a_busy_upstream_is_left_alone_for_as_long_as_it_asks(tmp_path: Path) -> None:
    async with rig(tmp_path, names=("a", "b")) as r:
        r.upstreams["a"].script = whole({"error": {"message": "slow down"}}, 429, **{"retry-after": "30"})
        r.upstreams["b"].script = whole(OK)
        assert [(await r.chat()).status_code for _ in range(4)] == [200] * 4
        assert len(r.upstreams["a"].bodies) == 1
        r.upstreams["b"].script = whole({"error": {"message": "slow down"}}, 429, **{"retry-after": "7"})
        told = await r.chat()
        assert (told.status_code, told.headers["retry-after"]) == (429, "30")


async def test_a_clients_error_never_opens_the_breaker(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        r.upstream.script = whole({"error": {"message": "no"}}, 404)
        for _ in range(10):
            assert (await r.chat()).status_code == 404
        assert r.worker._state(0).breakers == {"a": 0}


async def test_attempts_are_limited(tmp_path: Path) -> None:
    async with rig(tmp_path, names=("a", "b", "c", "d"), server={"max_attempts": 2}) as r:
        for upstream in r.upstreams.values():
            upstream.script = whole({"error": {"message": "x"}}, 500)
        assert (await r.chat()).status_code == 502
        assert len((await r.ledger()).attempts) == 2


async def test_the_same_beginning_goes_to_the_same_upstream(tmp_path: Path) -> None:
    async with rig(tmp_path, names=("a", "b"), affinity="prefix") as r:
        for upstream in r.upstreams.values():
            upstream.script = whole(OK)
        for number in range(8):
            messages = [{"role": "user", "content": f"document {number}"}]
            served = {(await r.chat(messages=messages)).headers["x-tokenline-upstream"] for _ in range(4)}
            assert len(served) == 1


async def test_a_dead_only_upstream_is_told_at_once_after_a_few_failures(tmp_path: Path) -> None:
    async with rig(tmp_path, names=("a",), dead=("gone",)) as r:
        r.upstream.script = whole({"error": {"message": "x"}}, 500)
        for _ in range(4):
            await r.chat()
        refused = await r.chat()
        assert refused.status_code == 503
        assert "retry-after" in refused.headers
        ledger = (await r.observer.closed(5))[4]
        assert (ledger.attempts, ledger.outcome) == ([], Outcome.UPSTREAM_ERROR)


async def test_checks_that_fail_end_no_request_that_has_nowhere_else_to_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "INTERVAL_SECONDS", 0.05)
    monkeypatch.setattr(health, "TIMEOUT_SECONDS", 0.05)
    async with rig(tmp_path, health_path="/models") as r:
        r.upstream.is_frozen = True
        r.upstream.script = stream(1.0, chunk("x", finish="stop"), DONE)
        assert (await r.chat(stream=True)).status_code == 200
        async with asyncio.timeout(5):
            while r.worker._state(0).breakers["a"] != 2:
                await asyncio.sleep(0.02)
        assert (await r.chat(stream=True)).status_code == 200
