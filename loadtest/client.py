"""Sends one request of a load test, with its retries, and writes down when what happened."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import aiohttp
import msgspec

from loadtest.endpoint import Endpoint
from loadtest.record import Fault, Record
from loadtest.settings import BenchSettings
from loadtest.stream import StreamReader, check_tokens, readable, shown, take_figures, take_text
from loadtest.workload import Prompt
from protocol.headers import REQUEST_ID, TOKENLINE_REQUEST_ID
from protocol.ids import LOAD_TEST_PREFIX
from protocol.openai import decode_answer, is_present
from tracing.clock import Clock

SHOWN_BYTES = 4096
FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 8.0
MAX_ID = 256


class LoadClient:
    """Asks an endpoint for chat completions."""

    def __init__(
        self,
        endpoint: Endpoint,
        model: str,
        settings: BenchSettings,
        clock: Clock,
        rng: random.Random,
        on_tokens: Callable[[int], None] = lambda _events: None,
        run_id: str = "unnamed",
    ) -> None:
        self._endpoint = endpoint
        self._model = model
        self._settings = settings
        self._clock = clock
        self._rng = rng
        self._on_tokens = on_tokens
        self._name = LOAD_TEST_PREFIX + run_id
        self._asked = 0

    async def ask(self, prompt: Prompt, record: Record) -> None:
        """One request to its end; a failure is written into the record, never raised."""
        body = msgspec.json.encode(self._body(prompt))
        record.group = prompt.group
        record.asked_prompt_tokens = prompt.tokens
        try:
            async with asyncio.timeout(self._settings.api.timeout_seconds):
                record.fault = await self._with_retries(body, record)
        except TimeoutError:
            record.fault = Fault("timeout", _where(record))
        except asyncio.CancelledError:
            record.fault = Fault("unfinished", _where(record))
            raise
        finally:
            record.end_ns = self._clock.mono_ns()

    async def _with_retries(self, body: bytes, record: Record) -> Fault | None:
        pause_s = FIRST_PAUSE_S
        while True:
            fault = await self._try(body, record)
            if fault is None or not fault.may_retry or record.retries >= self._settings.api.max_retries:
                return fault
            record.retries += 1
            record.retried_for.append(fault.kind)
            await asyncio.sleep(max(fault.retry_after_s, pause_s * self._rng.uniform(0.5, 1.5)))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _try(self, body: bytes, record: Record) -> Fault | None:
        record.sent_ns = record.sent_ns or self._clock.mono_ns()
        self._asked += 1
        # A name of its own tells a gateway, and whoever reads its log, that nobody waits for this answer.
        headers = {**self._endpoint.headers, REQUEST_ID: f"{self._name}-{self._asked}"}
        try:
            async with self._endpoint.session.post(self._endpoint.chat_url, data=body, headers=headers) as response:
                record.first_byte_ns = self._clock.mono_ns()
                record.gateway_id = _header(response, TOKENLINE_REQUEST_ID)
                record.request_id = record.gateway_id or _header(response, REQUEST_ID)
                if response.status != 200:
                    return await _refusal(response)
                if self._settings.workload.stream:
                    return await self._read_stream(response, record)
                return await self._read_whole(response, record)
        except (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError, aiohttp.InvalidURL) as error:
            return Fault("unreachable", readable(str(error)), may_retry=True)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            # A stream that has begun can't be asked for again: its times would be those of two answers.
            return Fault(
                "broken_stream", readable(f"{type(error).__name__}: {error}"), may_retry=not record.first_token_ns
            )

    async def _read_stream(self, response: aiohttp.ClientResponse, record: Record) -> Fault | None:
        if response.content_type != "text/event-stream":
            said = await response.content.read(SHOWN_BYTES)
            return Fault("not_sse", f"content-type {response.content_type}: {shown(said)}")
        reader = StreamReader(record)
        async for data in response.content.iter_any():
            now_ns = self._clock.mono_ns()
            events_before = len(record.token_events)
            if fault := reader.feed(data, now_ns):
                return fault
            if events := len(record.token_events) - events_before:
                self._on_tokens(events)
        return reader.end(self._clock.mono_ns())

    async def _read_whole(self, response: aiohttp.ClientResponse, record: Record) -> Fault | None:
        said = await response.read()
        now_ns = self._clock.mono_ns()
        try:
            answer = decode_answer(said)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return Fault("bad_event", f"not a chat completion: {shown(said)}")
        if is_present(answer.error):
            return Fault("error_event", shown(bytes(answer.error)))
        if any(choice.text or (choice.message is not None and choice.message.has_token) for choice in answer.choices):
            # One arrival of all tokens at once; a whole answer has no first token.
            record.token_events.append(now_ns)
            self._on_tokens(1)
            for choice in answer.choices:
                take_text(record, choice)
        take_figures(record, answer)
        fault = check_tokens(record)
        record.oddities.discard("several_tokens_in_an_event")
        return fault

    def _body(self, prompt: Prompt) -> dict[str, Any]:
        work = self._settings.workload
        body: dict[str, Any] = {
            "model": self._model,
            "messages": prompt.messages,
            "max_tokens": prompt.max_output_tokens or work.max_output_tokens,
            "temperature": work.temperature,
            "stream": work.stream,
        }
        if work.stream:
            body["stream_options"] = {"include_usage": True}
        if work.ignore_eos:
            body["ignore_eos"] = True
        return body


async def _refusal(response: aiohttp.ClientResponse) -> Fault:
    said = f"{response.status} {shown(await response.content.read(SHOWN_BYTES))}"
    status = response.status
    if status in (401, 403):
        return Fault("unauthorized", said)
    if status == 404:
        return Fault("not_found", said)
    if status == 429:
        return Fault("refused", said, may_retry=True, retry_after_s=_retry_after(response))
    if status < 500:
        return Fault("bad_request", said)
    return Fault("server_error", said, may_retry=True, retry_after_s=_retry_after(response))


def _retry_after(response: aiohttp.ClientResponse) -> float:
    try:
        seconds = float(response.headers.get("retry-after", 0))
    except ValueError:
        return 0.0
    return min(seconds, LONGEST_PAUSE_S) if seconds > 0 else 0.0  # what is no number is not over 0 either


def _header(response: aiohttp.ClientResponse, name: str) -> str | None:
    value = response.headers.get(name)
    return None if value is None else readable(value)[:MAX_ID]


def _where(record: Record) -> str:
    if record.first_token_ns:
        return f"in the stream, after {len(record.token_events)} events with tokens"
    return "before the first token" if record.first_byte_ns else "before any answer"
