"""Limits and keys that several gateways share through one Redis; Redis dead, frozen and back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_rig import DONE, Rig, chunk, rig, stream, whole
from redis_rig import RedisServer

from gateway.keys.changes import KeyChange, StoreUnreachable
from gateway.keys.limits import Limits
from gateway.keys.plans import Plans
from gateway.keys.record import KeyRecord, NewKey
from gateway.keys.redis_store import RedisKeyStore
from gateway.limits import shared as shared_module
from gateway.limits.budgets import Budgets
from gateway.limits.link import Link, LinkDown, Script
from gateway.limits.local import LocalLimits
from gateway.limits.script import RENEW
from gateway.limits.shared import SharedLimits
from settings.schema import PlanSettings, RedisSettings
from tracing.clock import FakeClock
from tracing.ledger import Outcome, WorkerState

ANSWER = {
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 6, "completion_tokens": 4, "total_tokens": 10},
}


def store_of(server: RedisServer) -> RedisKeyStore:
    return RedisKeyStore(server.settings(), 5)


@asynccontextmanager
async def gateways(tmp_path: Path, server: RedisServer, count: int = 2, **redis: object) -> AsyncIterator[list[Rig]]:
    """Workers with a state folder each and one Redis, which is given all the time that a busy machine needs."""
    redis.setdefault("timeout_ms", 4000)
    async with AsyncExitStack() as stack:
        more = {"redis": server.settings(**redis), "plans": {"free": PlanSettings(requests_per_minute=60)}}
        found = []
        for number in range(count):
            folder = tmp_path / str(number)
            folder.mkdir()
            found.append(await stack.enter_async_context(rig(folder, more=more)))
            found[-1].upstream.script = whole(ANSWER)
        yield found


async def ask(one: Rig, secret: str, **fields: object) -> httpx.Response:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    headers = {"authorization": f"Bearer {secret}"}
    return await one.client.post("/api/v1/chat/completions", json=body, headers=headers)


async def until(holds: Callable[[], bool], seconds: float = 10) -> None:
    async with asyncio.timeout(seconds):
        while not holds():
            await asyncio.sleep(0.02)


async def answers_with(one: Rig, secret: str, status: int, seconds: float = 10) -> httpx.Response:
    """The first answer with this status."""
    async with asyncio.timeout(seconds):
        while (answer := await ask(one, secret)).status_code != status:
            await asyncio.sleep(0.05)
    return answer


def degraded(one: Rig) -> bool | None:
    states = [record for record in one.observer.records if isinstance(record, WorkerState)]
    return states[-1].limits_degraded if states else None


# Two gateways


async def test_sixty_a_minute_are_sixty_over_both_gateways(tmp_path, redis_alone) -> None:
    secret, _ = store_of(redis_alone).create(NewKey("app", plan="free"))
    async with gateways(tmp_path, redis_alone) as both:
        answers = await asyncio.gather(*(ask(both[number % 2], secret) for number in range(80)))
        refused = [answer for answer in answers if answer.status_code == 429]
        assert [answer.status_code for answer in answers].count(200) == 60
        assert len(refused) == 20
        assert refused[0].json()["error"]["code"] == "rate_limit_exceeded"
        assert 1 <= int(refused[0].headers["retry-after"]) <= 61
        assert refused[0].headers["x-ratelimit-remaining-requests"] == "0"
        last = [ledger for one in both for ledger in await one.observer.closed(40)]
        assert [ledger.outcome for ledger in last].count(Outcome.RATE_LIMITED) == 20
        left = {int(answer.headers["x-ratelimit-remaining-requests"]) for answer in answers if answer.is_success}
        assert left == set(range(60))


async def test_a_key_made_anywhere_works_on_both_and_revoked_or_changed_is_so_on_both_within_5_s(
    tmp_path, redis_alone
) -> None:
    store = store_of(redis_alone)
    revoked, record = store.create(NewKey("app"))
    changed, _ = store.create(NewKey("other", plan="free"))
    async with gateways(tmp_path, redis_alone) as both:
        assert [(await ask(one, key)).status_code for one in both for key in (revoked, changed)] == [200] * 4
        store.revoke(record.id)
        store.alter("other", KeyChange(models=("else",)))
        began = time.monotonic()
        for one in both:
            answer = await answers_with(one, revoked, 401)
            assert answer.json()["error"]["code"] == "revoked_key"
            answer = await answers_with(one, changed, 403)
            assert answer.json()["error"]["code"] == "model_not_allowed"
        assert time.monotonic() - began < 5


async def test_places_in_flight_are_shared_and_given_back(tmp_path, redis_alone) -> None:
    secret, _ = store_of(redis_alone).create(NewKey("app", limits=Limits(concurrent_requests=1)))
    async with gateways(tmp_path, redis_alone) as (first, second):
        go_on = asyncio.Event()

        async def held(request: Any) -> Any:
            await go_on.wait()
            return await whole(ANSWER)(request)

        first.upstream.script = held
        running = asyncio.create_task(ask(first, secret))
        await first.upstream.asked.wait()
        refused = await ask(second, secret)
        assert refused.status_code == 429
        assert "concurrent_requests" in refused.json()["error"]["message"]
        go_on.set()
        assert (await running).status_code == 200
        await answers_with(second, secret, 200)


async def test_tokens_that_one_gateway_used_are_gone_on_the_other(tmp_path, redis_alone) -> None:
    limits = Limits(tokens_per_minute=15, tokens_per_day=1000)
    secret, record = store_of(redis_alone).create(NewKey("app", limits=limits))
    async with gateways(tmp_path, redis_alone) as (first, second):
        answer = await ask(first, secret)
        assert answer.headers["x-ratelimit-remaining-tokens"] == "15"
        await until(lambda: bool(redis_alone.client().keys(f"*{record.id}*:20*")))
        assert (await ask(second, secret)).headers["x-ratelimit-remaining-tokens"] == "5"
        first.upstream.script = stream(chunk("a"), chunk("b", "stop"), DONE)
        refused = await answers_with(first, secret, 429)
        assert "20 of 15 tokens" in refused.json()["error"]["message"]


async def test_without_a_count_the_token_events_are_debited(tmp_path, redis_alone) -> None:
    secret, record = store_of(redis_alone).create(NewKey("app", limits=Limits(tokens_per_day=1000)))
    async with gateways(tmp_path, redis_alone, count=1) as (one,):
        one.upstream.script = stream(chunk("a"), chunk("b"), chunk("c", "stop"), DONE)
        await ask(one, secret, stream=True)
        client = redis_alone.client()
        await until(lambda: bool(client.keys(f"*{record.id}*:20*")))
        (name,) = client.keys(f"*{record.id}*:20*")
        assert client.get(name) == b"3"


# Redis away


async def test_with_redis_frozen_requests_go_on_and_afterwards_limits_are_shared_again(tmp_path, redis_alone) -> None:
    secret, record = store_of(redis_alone).create(
        NewKey("app", limits=Limits(requests_per_minute=1000, tokens_per_month=10**6))
    )
    # With so long a timeout it shows, on a busy machine too, who waits for Redis and who does not.
    async with gateways(tmp_path, redis_alone, count=1, timeout_ms=2000) as (one,):
        assert (await ask(one, secret)).status_code == 200
        redis_alone.freeze()
        try:
            seconds = []
            for _ in range(10):
                began = time.monotonic()
                assert (await ask(one, secret)).status_code == 200
                seconds.append(time.monotonic() - began)
            assert max(seconds) < 4  # the first one waits for redis.timeout_ms, or nobody where the watch was faster
            assert sorted(seconds)[8] < 1.5  # the others do not wait
            await until(lambda: degraded(one) is True)
            # Longer than a verified key is fresh: the key store is frozen too, and nobody waits for it.
            await asyncio.sleep(5)
            began = time.monotonic()
            assert (await ask(one, secret)).status_code == 200
            assert time.monotonic() - began < 1.5
        finally:
            redis_alone.thaw()
        await until(lambda: degraded(one) is False)
        client = redis_alone.client()

        def debited() -> int:
            return sum(int(client.get(name) or 0) for name in client.keys(f"*{record.id}*:20*"))

        await until(lambda: debited() == 12 * 10)  # what was used meanwhile is not forgotten
        left = int((await ask(one, secret)).headers["x-ratelimit-remaining-requests"])
        assert left >= 1000 - 4  # counted by Redis: those of the outage were counted here


async def test_a_worker_starts_without_redis_and_finds_it_later(tmp_path, redis_alone) -> None:
    secret, _ = store_of(redis_alone).create(NewKey("app", limits=Limits(requests_per_minute=5)))
    redis_alone.freeze()
    try:
        async with gateways(tmp_path, redis_alone, count=1, timeout_ms=80) as (one,):
            await until(lambda: degraded(one) is True)
            assert (await one.chat()).status_code == 200  # the bootstrap key needs nobody
            stranger = await ask(one, secret)
            assert (stranger.status_code, stranger.json()["error"]["code"]) == (503, "upstream_unavailable")
            redis_alone.thaw()
            answer = await answers_with(one, secret, 200)
            assert "x-ratelimit-remaining-requests" in answer.headers
            await until(lambda: degraded(one) is False)
    finally:
        redis_alone.thaw()


async def test_a_frozen_redis_holds_a_request_up_for_80_ms_once(redis_alone) -> None:
    link = Link(redis_alone.url, RedisSettings().timeout_ms / 1e3, "t")
    assert await link.probe()
    redis_alone.freeze()
    try:
        began = time.monotonic()
        waiting = [link.ask(Script(RENEW), ["p"], "1 a") for _ in range(3)]
        assert [type(error) for error in await asyncio.gather(*waiting, return_exceptions=True)] == [LinkDown] * 3
        assert 0.07 < time.monotonic() - began < 1
        assert link.ask(Script(RENEW), ["p"], "1 a").exception()  # at once
        assert not await link.probe()
    finally:
        redis_alone.thaw()
    await until_probed(link)
    assert await link.ask(Script(RENEW), ["p"], "1 a") == 0
    await link.close()


async def until_probed(link: Link) -> None:
    async with asyncio.timeout(10):
        while not await link.probe():
            await asyncio.sleep(0.05)


async def test_dead_redis_refuses_limited_keys_where_that_is_asked_for(tmp_path, redis_alone) -> None:
    store = store_of(redis_alone)
    limited, _ = store.create(NewKey("limited", limits=Limits(requests_per_minute=1000)))
    free, _ = store.create(NewKey("free"))
    async with gateways(tmp_path, redis_alone, count=1, on_outage="refuse") as (one,):
        assert (await ask(one, limited)).status_code == (await ask(one, free)).status_code == 200
        redis_alone.kill()
        try:
            refused = await answers_with(one, limited, 503)
            assert refused.json()["error"]["code"] == "limits_unavailable"
            assert refused.headers["retry-after"] == "2"
            assert (await ask(one, free)).status_code == 200
            with pytest.raises(StoreUnreachable):
                store.list()
        finally:
            redis_alone.start_again()
        # The server came back empty; keys that were verified are served until the store says otherwise.
        await until(lambda: degraded(one) is False)


async def test_what_is_remembered_for_a_redis_that_is_away_is_bounded(redis_alone, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(shared_module, "MAX_OWED", 3)
    clock, plans = FakeClock(), Plans({})
    link = Link(redis_alone.url, 4, "t")
    local = LocalLimits(plans, clock, Budgets(tmp_path / "b.sqlite", clock, 1))
    shared = SharedLimits(plans, clock, link, local, prefix="t", on_outage="local")
    limits = Limits(tokens_per_day=10, concurrent_requests=9)
    link.down = True
    for number in range(10):
        grant = await shared.enter(KeyRecord(f"key_{number % 5}", "app", b"", 0, limits=limits), f"req_{number}")
        grant.leave(1)
    assert {key_id: tokens for key_id, (_, tokens) in shared._owed.items()} == {"key_0": 2, "key_1": 2, "key_2": 2}
    link.down = False
    grant = await shared.enter(KeyRecord("key_9", "app", b"", 0, limits=limits), "req")
    assert shared._running == {"key_9": {"req"}}
    grant.leave(0)
    assert shared._running == {}
    await link.close()
