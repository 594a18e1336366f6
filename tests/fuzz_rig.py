"""An upstream that speaks every surface, in a thread of its own, and notes what no gateway should have sent it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web
from hypothesis import HealthCheck, Phase, settings

USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
COUNTS = {"input_tokens": 3, "output_tokens": 2, "total_tokens": 5}
MESSAGE: dict[str, Any] = {
    "id": "msg_1", "type": "message", "role": "assistant", "model": "m", "content": [{"type": "text", "text": "hi"}],
    "stop_reason": "end_turn", "stop_sequence": None, "usage": {"input_tokens": 3, "output_tokens": 2},
}  # fmt: skip
RESPONSE: dict[str, Any] = {
    "id": "resp_1", "object": "response", "created_at": 1, "status": "completed", "model": "m", "output": [],
    "usage": COUNTS,
}  # fmt: skip
WHOLE: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "id": "c", "object": "chat.completion", "created": 1, "model": "m", "usage": USAGE,
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}],
    },
    "/v1/completions": {
        "id": "c", "object": "text_completion", "created": 1, "model": "m", "usage": USAGE,
        "choices": [{"index": 0, "text": "hi", "finish_reason": "stop"}],
    },
    "/v1/responses": RESPONSE,
    "/v1/messages": MESSAGE,
    "/v1/messages/count_tokens": {"input_tokens": 3},
    "/v1/embeddings": {"object": "list", "model": "m", "usage": USAGE, "data": []},
    "/tokenize": {"count": 3, "max_model_len": 100, "tokens": [1, 2, 3]},
    "/detokenize": {"prompt": "hi"},
}  # fmt: skip


def _chunk(choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": choices, **more}


STREAMS: dict[str, list[dict[str, Any] | str]] = {
    "/v1/chat/completions": [
        _chunk([{"index": 0, "delta": {"role": "assistant", "content": "hi"}, "finish_reason": None}]),
        _chunk([{"index": 0, "delta": {}, "finish_reason": "stop"}]),
        _chunk([], usage=USAGE),
        "[DONE]",
    ],
    "/v1/completions": [
        _chunk([{"index": 0, "text": "hi", "finish_reason": "stop"}]),
        _chunk([], usage=USAGE),
        "[DONE]",
    ],
    "/v1/responses": [
        {"type": "response.created", "response": {**RESPONSE, "status": "in_progress"}},
        {"type": "response.output_text.delta", "delta": "hi", "output_index": 0, "content_index": 0, "item_id": "i"},
        {"type": "response.completed", "response": RESPONSE},
    ],
    "/v1/messages": [
        {"type": "message_start", "message": {**MESSAGE, "content": []}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "hi"}},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 2}},
        {"type": "message_stop"},
    ],
}


class Everything:
    """Answers well whatever it is asked."""

    def __init__(self) -> None:
        self.url = ""
        self.strange: list[str] = []
        """What it was sent and should not have been."""

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.method == "GET":
            return web.json_response({"object": "list", "data": []})
        body = await request.read()
        try:
            fields = json.loads(body.decode())
        except ValueError as error:
            self.strange.append(f"{request.path}: {error}: {body[:200]!r}")
            return web.json_response({"error": {"message": "not JSON"}}, status=400)
        if request.path not in WHOLE or not isinstance(fields, dict) or fields.get("model") not in ("native", "chat"):
            self.strange.append(f"{request.path}: {body[:200]!r}")
            return web.json_response({"error": {"message": "no such thing"}}, status=404)
        if fields.get("stream") is True and request.path in STREAMS:
            return await self._stream(request)
        return web.json_response(WHOLE[request.path])

    async def _stream(self, request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for event in STREAMS[request.path]:
            name = f"event: {event['type']}\n" if isinstance(event, dict) and "type" in event else ""
            data = event if isinstance(event, str) else json.dumps(event)
            await response.write(f"{name}data: {data}\n\n".encode())
        return response

    @contextmanager
    def serving(self) -> Iterator[Everything]:
        """Listens on a free port until the block ends."""
        loop = asyncio.new_event_loop()

        async def start() -> web.ServerRunner:
            runner = web.ServerRunner(web.Server(self.handle), shutdown_timeout=0.1)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            return runner

        runner = loop.run_until_complete(start())
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
            loop.call_soon_threadsafe(loop.stop)
            thread.join(10)
            loop.close()


class Scripted:
    """An upstream that answers every POST with the bytes that the test laid out, whatever they are."""

    def __init__(self) -> None:
        self.url = ""
        self.answer = b""
        self.closes = False
        """After the answer."""
        self.asked = 0

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    (line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), b":0"
                )
                await reader.readexactly(int(length.partition(b":")[2]))
                self.asked += 1
                writer.write(self.answer)
                await writer.drain()
                if self.closes:
                    break
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    @contextmanager
    def serving(self) -> Iterator[Scripted]:
        """Listens on a free port until the block ends."""
        loop = asyncio.new_event_loop()
        server = loop.run_until_complete(asyncio.start_server(self._connection, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()

        async def end() -> None:
            server.close()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

        try:
            yield self
        finally:
            asyncio.run_coroutine_threadsafe(end(), loop).result(10)
            loop.call_soon_threadsafe(loop.stop)
            thread.join(10)
            loop.close()


def two_upstreams(url: str, server: str, upstream: str = "") -> str:
    """A configuration with these lines in its tables: `all` speaks every surface, `some` chat and tokenize alone."""
    every = ["chat", "completions", "responses", "messages", "count_tokens", "embeddings", "tokenize"]
    spoken = {"all": every, "some": ["chat", "tokenize"]}
    lines = ['[engine]\nbackend = "none"', f"[server]\n{server}"]
    for name, surfaces in spoken.items():
        lines.append(f'[[upstreams]]\nname = "{name}"\nurl = "{url}"\nsurfaces = {json.dumps(surfaces)}\n{upstream}')
    for model, name in {"native": "all", "chat": "some"}.items():
        lines.append(f'[[models]]\nname = "{model}"\ntargets = [{{ upstream = "{name}" }}]')
    return "\n".join(lines)


def quiet(max_examples: int) -> settings:
    """Hypothesis without a deadline or a random seed of its own: a failure is the gateway's, and comes again."""
    return settings(
        max_examples=max_examples,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
    )
