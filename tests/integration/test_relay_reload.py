"""A worker that is reloaded: requests under way stay as they are, new ones find the new table."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gateway_rig import ANSWER, DONE, KEY, Rig, chunk, rig, stream, whole

from gateway.keys.record import NewKey
from gateway.keys.store import KeyStore
from gateway.upstreams import health
from gateway.upstreams.breaker import BreakerState
from settings.schema import PlanSettings, RouteSettings, Settings, TargetSettings


def with_models(r: Rig, *names: str, **models: str) -> Settings:
    """The rig's settings with these upstreams, and these models (name -> upstream)."""
    routes = tuple(RouteSettings(name=m, targets=(TargetSettings(upstream=u),)) for m, u in models.items())
    upstreams = tuple(entry for entry in r.settings.upstreams if entry.name in names)
    return r.settings.model_copy(update={"upstreams": upstreams, "models": routes})


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.01)


async def test_a_stream_goes_on_at_an_upstream_that_was_taken_out_and_then_nothing_is_left_of_it(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path, names=("a", "b")) as r:
        release = asyncio.Event()

        async def held(request: Any) -> Any:
            response = await stream(chunk("x"))(request)
            await release.wait()
            for piece in (chunk(finish="stop"), DONE):
                await response.write(piece)
            return response

        r.upstreams["a"].script, r.upstreams["b"].script = held, whole(ANSWER)
        r.worker.reload(with_models(r, "a", m="a"))
        running = asyncio.create_task(r.chat(stream=True))
        await r.upstreams["a"].asked.wait()
        r.worker.reload(with_models(r, "b", new="b"))
        assert (await r.chat(model="new")).status_code == 200
        gone = await r.chat(model="m")
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")
        listed = (await r.client.get("/v1/models")).json()["data"]
        assert [model["id"] for model in listed] == ["new"]
        assert r.worker._state(0).inflight == {"a": 1, "b": 0}
        release.set()
        answer = await running
        assert answer.status_code == 200
        assert answer.text.endswith("data: [DONE]\n\n")
        assert r.worker._state(0).inflight == {"b": 0}
        assert len(r.worker._client._pools) == 1


async def test_a_request_that_waited_while_its_upstream_was_taken_out_is_answered_there(tmp_path: Path) -> None:
    limits = {"max_concurrent_requests": 1, "queue_size": 1, "queue_timeout_ms": 20_000}
    async with rig(tmp_path, names=("a", "b"), server=limits) as r:
        release = asyncio.Event()

        async def held(request: Any) -> Any:
            await release.wait()
            return await whole(ANSWER)(request)

        r.upstreams["a"].script = held
        r.worker.reload(with_models(r, "a", m="a"))
        asking = [asyncio.create_task(r.chat()) for _ in range(2)]
        await until(lambda: r.worker._admission.waiting == 1)
        r.worker.reload(with_models(r, "b", new="b"))
        release.set()
        assert [(await task).status_code for task in asking] == [200, 200]
        assert len(r.upstreams["a"].bodies) == 2
        assert r.worker._state(0).inflight == {}
        assert not r.worker._client._pools


async def test_what_is_known_of_an_upstream_is_kept_while_it_stays_where_it_is(tmp_path: Path) -> None:
    async with rig(tmp_path, names=("a", "b")) as r:
        for upstream in r.upstreams.values():
            upstream.script = whole({"error": {}}, status=500)
        for _ in range(3):
            await r.chat()
        upstreams = {target.upstream.name: target.upstream for target in r.worker._router.choose("m").targets}
        a, b = (r.worker._balancer.of(upstreams[name]) for name in "ab")
        assert {a.breaker.state, b.breaker.state} == {BreakerState.OPEN}
        moved = tuple(
            entry.model_copy(update={"url": entry.url + "/"} if entry.name == "a" else {"url": entry.url + "/x"})
            for entry in r.settings.upstreams
        )
        r.worker.reload(r.settings.model_copy(update={"upstreams": moved}))
        assert r.worker._state(0).breakers == {"a": BreakerState.OPEN}
        r.upstreams["b"].script = whole(ANSWER)  # at its new place it gets a new chance
        assert (await r.chat()).status_code == 200
        assert r.upstreams["b"].paths[-1] == "/v1/x/chat/completions"
        assert r.worker._state(0).breakers == {"a": BreakerState.OPEN, "b": BreakerState.CLOSED}


async def test_health_checks_follow_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "INTERVAL_SECONDS", 0.05)
    async with rig(tmp_path, names=("a", "b"), health_path="/models") as r:
        r.worker.reload(with_models(r, "a", m="a"))
        await until(lambda: r.upstreams["a"].checks > 0)
        assert r.upstreams["b"].checks == 0
        r.worker.reload(with_models(r, "b", m="b"))
        checks = r.upstreams["a"].checks
        await until(lambda: r.upstreams["b"].checks > 0)
        assert r.upstreams["a"].checks == checks


async def test_plans_limits_and_the_configured_key_are_those_of_the_new_settings(tmp_path: Path) -> None:
    more = {"plans": {"free": PlanSettings(requests_per_minute=1000)}}
    async with rig(tmp_path, more=more) as r:
        r.upstream.script = whole(ANSWER)
        secret, _ = KeyStore(r.settings.keys_path).create(NewKey("app", plan="free"))
        headers = {"authorization": f"Bearer {secret}"}
        ask = {"json": {"model": "m", "messages": []}, "headers": headers}
        before = await r.client.post("/v1/chat/completions", **ask)
        assert before.headers["x-ratelimit-limit-requests"] == "1000"
        server = r.settings.server.model_copy(
            update={"api_key": None, "max_body_bytes": 1024, "max_concurrent_requests": 3}
        )
        plans = {"free": PlanSettings(requests_per_minute=1)}
        r.worker.reload(r.settings.model_copy(update={"server": server, "plans": plans}))
        refused = await r.client.post("/v1/chat/completions", **ask)
        assert refused.status_code == 429
        assert "1 of 1" in refused.json()["error"]["message"]
        stranger = await r.client.get("/v1/models", headers={"authorization": f"Bearer {KEY}"})
        assert stranger.status_code == 401
        r.worker.reload(r.settings.model_copy(update={"server": server.model_copy(update={"api_key": None})}))
        large = await r.client.post("/v1/chat/completions", json={"model": "m", "pad": "x" * 2000}, headers=headers)
        assert large.status_code == 413
