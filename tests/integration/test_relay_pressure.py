"""Clients that read slowly, wait in the queue, or are told apart from a slow upstream."""

import asyncio
import json
import socket
from collections.abc import Callable
from pathlib import Path

from aiohttp import web
from gateway_rig import ANSWER, DONE, KEY, Rig, chunk, rig, stream

from gateway.keys.record import NewKey
from gateway.keys.store import KeyStore
from tracing.ledger import Outcome


async def raw_client(r: Rig, receive_buffer: int | None = None) -> socket.socket:
    """A streaming request on a socket of our own; nothing of the answer is read."""
    loop = asyncio.get_running_loop()
    client = socket.socket()
    if receive_buffer:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.setblocking(False)
    await loop.sock_connect(client, ("127.0.0.1", r.settings.server.port))
    body = json.dumps({"model": "m", "stream": True}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %s\r\ncontent-length: %d\r\n\r\n"
    await loop.sock_sendall(client, head % (KEY.encode(), len(body)) + body)
    return client


async def read_to_end(client: socket.socket) -> bytes:
    loop = asyncio.get_running_loop()
    found = b""
    while not found.endswith(b"0\r\n\r\n"):
        found += await loop.sock_recv(client, 65536)
    client.close()
    return found


async def test_a_slow_reader_is_back_pressure_and_not_a_slow_upstream(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        pieces = [piece for _ in range(40) for piece in (chunk("x" * 20_000), 0.01)]
        r.upstream.script = stream(*pieces, chunk(finish="stop"), DONE)
        client = await raw_client(r, receive_buffer=4096)
        ledgers = asyncio.create_task(r.observer.closed())
        await asyncio.sleep(0.7)
        assert b"finish" in await read_to_end(client)
        ledger = (await ledgers)[0]
        assert ledger.outcome is Outcome.OK
        assert ledger.backpressure_ns > 0.5 * (ledger.upstream_end - ledger.first_token)
        # The upstream was read at its own pace: up to a megabyte waits for the client, not in the upstream.
        assert ledger.last_token - ledger.first_token < 0.7e9 + 40 * 0.01e9


async def test_a_quick_reader_has_no_back_pressure(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        r.upstream.script = stream(
            *[piece for _ in range(20) for piece in (chunk("x"), 0.01)], chunk(finish="stop"), DONE
        )
        await r.chat(stream=True)
        ledger = await r.ledger()
        assert ledger.backpressure_ns == 0
        assert ledger.client_rtt_ns > 0


async def test_a_request_waits_for_a_place_and_its_wait_is_a_stage(tmp_path: Path) -> None:
    async with rig(tmp_path, server={"max_concurrent_requests": 1, "queue_size": 1, "queue_timeout_ms": 5000}) as r:
        r.upstream.script = stream(chunk("a"), 0.2, chunk(finish="stop"), DONE)
        answers = await asyncio.gather(r.chat(stream=True), r.chat(stream=True))
        assert [answer.status_code for answer in answers] == [200, 200]
        first, second = await r.observer.closed(2)
        assert first.admitted - first.routed < 0.05e9
        assert second.admitted >= first.upstream_end
        assert second.admitted - second.routed > 0.15e9


async def test_a_client_that_leaves_the_queue_never_reaches_an_upstream(tmp_path: Path) -> None:
    async with rig(tmp_path, server={"max_concurrent_requests": 1, "queue_size": 1, "queue_timeout_ms": 5000}) as r:
        r.upstream.script = stream(chunk("a"), 30.0)
        first = await raw_client(r)
        await r.upstream.asked.wait()
        second = await raw_client(r)
        while not r.worker._admission.waiting:
            await asyncio.sleep(0.01)
        second.close()
        ledger = await r.ledger()
        assert (ledger.outcome, ledger.attempts, ledger.admitted) == (Outcome.CLIENT_CANCELLED, [], 0)
        assert ledger.routed
        assert r.worker._admission.waiting == 0
        first.close()
        await r.observer.closed(2)
        assert r.worker._admission.inflight == 0
        assert len(r.upstream.bodies) == 1


async def test_a_wait_over_its_time_is_refused_and_told_apart_from_a_rate_limit(tmp_path: Path) -> None:
    async with rig(tmp_path, server={"max_concurrent_requests": 1, "queue_size": 1, "queue_timeout_ms": 100}) as r:
        r.upstream.script = stream(chunk("a"), 30.0)
        client = await raw_client(r)
        await r.upstream.asked.wait()
        refused = await r.chat()
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        ledger = await r.ledger()
        assert ledger.outcome is Outcome.QUEUE_REJECTED
        assert ledger.finish - ledger.routed > 0.09e9
        client.close()


async def test_the_worker_says_whose_first_token_is_waited_for_longest(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        r.upstream.script = stream(30.0)
        client = await raw_client(r)
        await r.upstream.asked.wait()
        state = r.worker._state(0)
        assert list(state.waiting) == ["m"]
        assert state.inflight == {"a": 1}
        client.close()
        await r.ledger()
        assert r.worker._state(0).waiting == {}


async def test_a_stream_that_outlives_the_drain_ends_in_an_error_event_and_a_ledger(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        r.upstream.script = stream(chunk("a"), 30.0)
        answer = asyncio.create_task(r.chat(stream=True))
        await r.upstream.asked.wait()
        while not r.observer.first_tokens():
            await asyncio.sleep(0.01)
        await r.stop()
        text = (await answer).text
        assert '"code":"shutting_down"' in text
        ledger = await r.ledger()
        assert (ledger.outcome, ledger.error_code) == (Outcome.GATEWAY_ERROR, "shutting_down")
        await r.upstream.cancelled.wait()


async def test_a_large_body_arrives_whole_and_is_sent_before_the_upstream_has_it(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        received = []

        async def late(request: web.Request) -> web.StreamResponse:
            received.append(r.worker.clock.mono_ns())
            return web.json_response(ANSWER)

        r.upstream.script = late
        body = json.dumps({"model": "alias", "messages": [{"role": "user", "content": "x" * 5_000_000}]}).encode()
        assert (await r.client.post("/v1/chat/completions", content=body)).status_code == 200
        assert json.loads(r.upstream.bodies[0])["messages"] == json.loads(body)["messages"]
        attempt = (await r.ledger()).attempts[0]
        assert attempt.connected <= attempt.request_sent <= received[0]


async def test_a_key_that_filled_the_queue_gives_way_to_one_that_asks_for_a_single_place(tmp_path: Path) -> None:
    limits = {"max_concurrent_requests": 1, "queue_size": 3, "queue_timeout_ms": 20_000}
    async with rig(tmp_path, server=limits) as r:
        modest, _ = KeyStore(r.settings.keys_path).create(NewKey("modest"))
        release = asyncio.Event()

        async def held(request: web.Request) -> web.StreamResponse:
            await release.wait()
            return web.json_response(ANSWER)

        r.upstream.script = held
        greedy = [asyncio.create_task(r.chat(user=str(number))) for number in range(4)]
        await until(lambda: r.worker._admission.waiting == 3)
        body = {"model": "m", "messages": []}
        headers = {"authorization": f"Bearer {modest}"}
        last = asyncio.create_task(r.client.post("/v1/chat/completions", json=body, headers=headers))
        await until(lambda: any(task.done() for task in greedy))
        refused = next(task for task in greedy if task.done()).result()
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert refused.headers["retry-after"] == "1"
        assert "newest gave way" in refused.json()["error"]["message"]
        release.set()
        assert (await last).status_code == 200
        assert sorted([(await task).status_code for task in greedy]) == [200, 200, 200, 429]
        # Of those that waited it was the first, though it came last.
        ledgers = sorted(
            (ledger for ledger in await r.observer.closed(5) if ledger.admitted), key=lambda ledger: ledger.admitted
        )
        assert [ledger.key_alias for ledger in ledgers] == ["bootstrap", "modest", "bootstrap", "bootstrap"]


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.01)
