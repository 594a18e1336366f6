"""Limits as a client meets them, in one worker without Redis: headers, refusals, tokens of streams and of leavers."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
from gateway_rig import DONE, USAGE_EVENT, Rig, chunk, rig, stream, whole

from gateway.keys.limits import Limits
from gateway.keys.record import NewKey
from gateway.keys.store import KeyStore
from settings.schema import KeysSettings, PlanSettings
from tracing.ledger import Outcome

BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


class Client:
    """Asks with a limited key."""

    def __init__(self, one: Rig, limits: Limits) -> None:
        self.rig = one
        self.secret, _ = KeyStore(one.settings.keys_path).create(NewKey("app", "red", limits=limits))
        self.headers = {"authorization": f"Bearer {self.secret}"}

    async def ask(self, **fields: object) -> httpx.Response:
        return await self.rig.client.post("/api/v1/chat/completions", json={**BODY, **fields}, headers=self.headers)


@asynccontextmanager
async def limited(tmp_path: Path, more: dict[str, object] | None = None, **limits: int) -> AsyncIterator[Client]:
    async with rig(tmp_path, more=more) as one:
        yield Client(one, Limits(**limits))


async def test_every_answer_of_a_limited_key_tells_what_is_left_and_an_upstreams_word_gives_way(tmp_path) -> None:
    async with limited(tmp_path, requests_per_minute=4, tokens_per_day=1000) as client:
        client.rig.upstream.script = whole({"choices": []}, **{"x-ratelimit-limit-requests": "9", "x-other": "1"})
        answered = await client.ask()
        assert answered.headers.get_list("x-ratelimit-limit-requests") == ["4"]
        assert answered.headers["x-other"] == "1"
        unknown = await client.ask(model="nobody's")
        assert unknown.status_code == 404
        client.rig.upstream.script = stream(chunk("a", "stop"), DONE)
        streamed = await client.ask(stream=True)
        client.rig.upstream.script = whole({"error": {"message": "no"}}, status=400)
        refused = await client.ask()
        left = [answer.headers["x-ratelimit-remaining-requests"] for answer in (answered, unknown, streamed, refused)]
        assert left == ["3", "2", "1", "0"]
        assert streamed.headers["x-ratelimit-limit-tokens"] == "1000"
        over = await client.ask()
        assert over.status_code == 429
        assert int(over.headers["retry-after"]) >= 55
        assert "x-ratelimit-limit-requests" not in (await client.rig.chat()).headers  # the bootstrap key has no limit


async def test_a_refusal_is_rate_limited_and_its_body_is_not_read(tmp_path) -> None:
    async with limited(tmp_path, requests_per_minute=1) as client:
        client.rig.upstream.script = whole({"choices": []})
        await client.ask()
        await client.ask()
        ledger = (await client.rig.observer.closed(2))[1]
        assert (ledger.outcome, ledger.error_code, ledger.status) == (
            Outcome.RATE_LIMITED, "rate_limit_exceeded", 429,
        )  # fmt: skip
        assert (ledger.key_alias, ledger.team, ledger.request_bytes, ledger.attempts) == ("app", "red", 0, [])


async def test_tokens_of_a_stream_are_debited_by_its_usage_though_the_client_did_not_ask_for_it(tmp_path) -> None:
    async with limited(tmp_path, tokens_per_minute=10) as client:
        client.rig.upstream.script = stream(chunk("a"), chunk("b", "stop"), USAGE_EVENT, DONE)
        assert "usage" not in (await client.ask(stream=True)).text
        second = await client.ask(stream=True)
        assert second.headers["x-ratelimit-remaining-tokens"] == "3"
        third = await client.ask()
        assert third.status_code == 429
        assert "tokens_per_minute is reached: 14 of 10" in third.json()["error"]["message"]


async def test_who_leaves_pays_for_the_events_that_came_and_gives_the_place_back(tmp_path) -> None:
    async with limited(tmp_path, tokens_per_month=100, concurrent_requests=1) as client:
        client.rig.upstream.script = stream(chunk("a"), chunk("b"), chunk("c"), 30.0)
        asked = client.rig.client.stream(
            "POST", "/api/v1/chat/completions", json={**BODY, "stream": True}, headers=client.headers
        )
        async with asked as answer:
            seen = b""
            async for piece in answer.aiter_raw():
                seen += piece
                if b'"c"' in seen:
                    break
            assert (await client.ask()).status_code == 429
        async with asyncio.timeout(5):
            await client.rig.upstream.cancelled.wait()
            while (again := await _whole(client)).status_code == 429:
                await asyncio.sleep(0.02)
        assert again.headers["x-ratelimit-remaining-tokens"] == "97"


async def _whole(client: Client) -> httpx.Response:
    client.rig.upstream.script = whole({"choices": []})
    return await client.ask()


async def test_a_budget_outlives_the_worker(tmp_path) -> None:
    usage = {"prompt_tokens": 60, "completion_tokens": 40, "total_tokens": 100}
    async with limited(tmp_path, tokens_per_month=100) as client:
        client.rig.upstream.script = whole({"choices": [], "usage": usage})
        assert (await client.ask()).status_code == 200
    shutil.rmtree(tmp_path / "run")
    async with rig(tmp_path) as again:
        answer = await again.client.post("/api/v1/chat/completions", json=BODY, headers=client.headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "budget_exceeded")


async def test_the_default_plan_holds_for_keys_that_name_none(tmp_path) -> None:
    more = {"plans": {"free": PlanSettings(requests_per_minute=7)}, "keys": KeysSettings(default_plan="free")}
    async with limited(tmp_path, more) as client:
        client.rig.upstream.script = whole({"choices": []})
        assert (await client.ask()).headers["x-ratelimit-remaining-requests"] == "6"
        assert (await client.rig.chat()).headers["x-ratelimit-remaining-requests"] == "6"
