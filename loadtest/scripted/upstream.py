"""The scripted upstream's server: plays the script that a request carries, and writes down what it did."""

from __future__ import annotations

import asyncio
import contextlib
import json
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web

from loadtest.scripted import events
from loadtest.scripted.engine import server_timing_of, spans_of, timings_of
from loadtest.scripted.script import Script, script_of
from loadtest.scripted.stage import Stage
from loadtest.scripted.witness import Witness, Written
from tracing.clock import Clock

MAX_BODY_BYTES = 64 * 2**20
_STREAM_HEADERS = {"content-type": "text/event-stream", "cache-control": "no-cache"}

SendSpans = Callable[[bytes], Awaitable[None]]
"""Takes an OTLP body in protobuf."""


def otlp_sender(endpoint: str, token: str | None = None) -> SendSpans:
    """Posts engine spans to an OTLP/HTTP receiver."""
    headers = {"content-type": "application/x-protobuf"} | ({"authorization": f"Bearer {token}"} if token else {})

    async def send(body: bytes) -> None:
        async with aiohttp.ClientSession() as session:
            await session.post(endpoint, data=body, headers=headers)

    return send


class Cut(Exception):
    """The script says that the connection ends here."""


class ScriptedUpstream:
    """One server. Several may share a stage, as the targets of one model do."""

    def __init__(
        self, stage: Stage, clock: Clock, *, name: str = "scripted", send_spans: SendSpans | None = None
    ) -> None:
        self.stage = stage
        self.name = name
        self.url = ""
        """Base URL, `/v1` included; known once it serves."""
        self._clock = clock
        self._send_spans = send_spans
        self._answered: weakref.WeakSet[asyncio.BaseTransport] = weakref.WeakSet()
        self._later: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def serving(self, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[ScriptedUpstream]:
        """Listens until the block ends. Raises OSError where the port is taken."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_get("/{prefix:.*}models", self._models)
        app.router.add_post("/{prefix:.*}chat/completions", self._chat)
        app.router.add_post("/{prefix:.*}completions", self._completions)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1, access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port, backlog=1024).start()
            self.url = f"http://{host}:{runner.addresses[0][1]}/v1"
            yield self
        finally:
            for task in self._later:
                task.cancel()
            await asyncio.gather(*self._later, return_exceptions=True)
            await runner.cleanup()

    async def _models(self, _request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "scripted", "object": "model"}]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, "chat")

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, "completions")

    async def _answer(self, request: web.Request, surface: str) -> web.StreamResponse:
        now = self._clock.mono_ns()
        headers = {name.lower(): value for name, value in request.headers.items()}
        reused = request.transport in self._answered
        witness = Witness("", self.name, 0, surface, headers, reused=reused, received_ns=now, writes=[])
        witness.body = await request.read()
        witness.body_read_ns = self._clock.mono_ns()
        try:
            script = script_of(witness.body) or Script(id="")
        except ValueError as error:
            return web.json_response({"error": {"message": f"the script can't be read: {error}"}}, status=400)
        witness.script_id = script.id
        self.stage.enter(witness)
        play = _Play(script, witness, request, self._clock, self.stage.changed)
        try:
            return await play.run(ends_badly=script.ends_badly_at(self.name))
        except Cut:
            assert request.transport is not None
            request.transport.abort()
            witness.ended_ns = self._clock.mono_ns()
            return web.Response()
        except (asyncio.CancelledError, ConnectionError):
            witness.gone_ns = self._clock.mono_ns()
            raise
        finally:
            if request.transport is not None:
                self._answered.add(request.transport)
            self.stage.changed()
            if script.spans != "none" and self._send_spans is not None:
                self._keep(self._report(script, witness, self._send_spans))

    async def _report(self, script: Script, witness: Witness, send: SendSpans) -> None:
        await asyncio.sleep(script.span_delay_ms / 1e3)
        body = spans_of(script, witness, wall_minus_mono_ns=self._clock.wall_ns() - self._clock.mono_ns())
        if body is not None:
            with contextlib.suppress(aiohttp.ClientError):
                await send(body)

    def _keep(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._later.add(task)
        task.add_done_callback(self._later.discard)


class _Play:
    """One answer on its way out."""

    def __init__(
        self, script: Script, witness: Witness, request: web.Request, clock: Clock, changed: Callable[[], None]
    ) -> None:
        self._script = script
        self._witness = witness
        self._request = request
        self._clock = clock
        self._changed = changed
        fields = json.loads(witness.body or b"{}")
        self._model = str(fields.get("model", "scripted"))
        self._stream = bool(fields.get("stream"))
        self._wants_usage = bool((fields.get("stream_options") or {}).get("include_usage"))

    async def run(self, *, ends_badly: bool) -> web.StreamResponse:
        script, witness = self._script, self._witness
        end = script.end if ends_badly else "complete"
        if end == "cut_first" or (end == "drop_reused" and witness.reused):
            raise Cut
        if end == "status":
            return await self._send_status()
        # The scripted engine: these pauses are its stages.
        await _pause(script.tokenize_ms)
        witness.queued_ns = self._clock.mono_ns()
        if self._stream:
            return await self._send_stream(end)
        return await self._send_whole()

    async def _send_status(self) -> web.StreamResponse:
        script = self._script
        await _pause(script.headers_ms)
        now = self._witness.headers_ns = self._clock.mono_ns()
        body = json.dumps(events.ERROR).encode()
        self._witness.writes.append(Written("status", now, now, body))
        headers = {"content-type": "application/json"} | ({"retry-after": "7"} if script.status in (429, 503) else {})
        return await self._send_body(body, script.status, headers)

    async def _send_whole(self) -> web.StreamResponse:
        script, witness = self._script, self._witness
        await self._compute_first_token()
        await _pause(script.gap_ms * max(0, script.tokens - 1))
        witness.last_token_ns = self._clock.mono_ns()
        await _pause(script.headers_ms)
        now = witness.headers_ns = self._clock.mono_ns()
        timings = timings_of(script, witness, first_written_ns=now)
        body = events.whole_body(script, self._model, witness.surface, timings)
        witness.writes.append(Written("body", now, now, body, script.tokens))
        return await self._send_body(body, 200, {"content-type": "application/json"} | self._extra_headers())

    async def _send_body(self, body: bytes, status: int, headers: dict[str, str]) -> web.StreamResponse:
        response = web.StreamResponse(status=status, headers=headers)
        response.content_length = len(body)
        await response.prepare(self._request)
        await response.write(body)
        await response.write_eof()
        self._witness.ended_ns = self._clock.mono_ns()
        return response

    async def _send_stream(self, end: str) -> web.StreamResponse:
        script, witness = self._script, self._witness
        early = script.headers_ms == 0 and not script.server_timing
        response = web.StreamResponse(headers=_STREAM_HEADERS)
        if early:
            await self._begin(response)
            if end == "error_first":
                await self._write(response, events.error_event(script))
                return await self._end(response)
            if witness.surface == "chat" and script.role_event:
                await self._write(response, events.role_event(script, self._model))
        await self._compute_first_token()
        if not early:
            await _pause(script.headers_ms)
            response.headers.update(self._extra_headers())
            await self._begin(response)
            if end == "error_first":
                await self._write(response, events.error_event(script))
                return await self._end(response)
            if witness.surface == "chat" and script.role_event:
                await self._write(response, events.role_event(script, self._model))
        for number, event in enumerate(events.token_events(script, self._model, witness.surface)):
            if number:
                await _pause(script.gap_ms)
            await self._write_token(response, event, is_first=number == 0)
            if number == 0 and end == "cut_mid":
                raise Cut
            if number == 0 and end == "error_mid":
                await _pause(script.gap_ms)
                await self._write(response, events.error_event(script))
                return await self._end(response)
        await _pause(script.gap_ms)
        first_written = witness.token_events[0].first_ns if witness.token_events else 0
        timings = timings_of(script, witness, first_written_ns=first_written)
        await self._write(response, events.finish_event(script, self._model, witness.surface, timings))
        for event in self._last_events():
            await self._write(response, event)
        await _pause(script.tail_ms)
        return await self._end(response)

    async def _compute_first_token(self) -> None:
        await _pause(self._script.queue_ms)
        self._witness.scheduled_ns = self._clock.mono_ns()
        self._changed()
        await _pause(self._script.prefill_ms)
        self._witness.prefill_end_ns = self._clock.mono_ns()

    async def _write_token(self, response: web.StreamResponse, event: events.Event, *, is_first: bool) -> None:
        script, witness = self._script, self._witness
        now = self._clock.mono_ns()
        if is_first and (timings := timings_of(script, witness, first_written_ns=now)):
            event = events.with_timings(event, timings, script)
        # The engine has a token before it writes it; the first one's instant is the prefill's end.
        witness.last_token_ns = witness.prefill_end_ns if is_first else now
        await self._write(response, event, first_ns=now)
        if script.comments:
            await self._write(response, events.comment(script))

    def _last_events(self) -> Iterator[events.Event]:
        script, surface = self._script, self._witness.surface
        # The official API sends the counts only where they are asked for; `twice` is a server that does not care.
        copies = {"once": int(self._wants_usage), "twice": 2}.get(script.usage, 0)
        for _ in range(copies):
            yield events.usage_event(script, self._model, surface)
        if script.done:
            yield events.done_event(script)

    def _extra_headers(self) -> dict[str, str]:
        return {"server-timing": server_timing_of(self._witness)} if self._script.server_timing else {}

    async def _begin(self, response: web.StreamResponse) -> None:
        self._witness.headers_ns = self._clock.mono_ns()
        await response.prepare(self._request)

    async def _write(self, response: web.StreamResponse, event: events.Event, *, first_ns: int = 0) -> None:
        size = self._script.piece_bytes or len(event.data)
        pieces = [event.data[start : start + size] for start in range(0, len(event.data), size)]
        first_ns = last_ns = first_ns or self._clock.mono_ns()
        for piece in pieces[:-1]:
            await response.write(piece)
            await _pause(self._script.piece_ms)
            last_ns = self._clock.mono_ns()
        # Written down before it is written: whoever reads the event may ask for its witness at once.
        self._witness.writes.append(Written(event.what, first_ns, last_ns, event.data, event.tokens))
        self._changed()
        await response.write(pieces[-1])

    async def _end(self, response: web.StreamResponse) -> web.StreamResponse:
        await response.write_eof()
        self._witness.ended_ns = self._clock.mono_ns()
        return response


async def _pause(ms: float) -> None:
    if ms > 0:
        await asyncio.sleep(ms / 1e3)
