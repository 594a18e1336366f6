"""The client before the gateway: asks for a script and notes when each byte of the answer was there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import aiohttp
import msgspec

from loadtest.conformance.reading import is_error, reasoning_in, text_in, usage_in
from loadtest.scripted.script import Script, body_of
from loadtest.stream import readable
from protocol.sse import EventSplitter, event_data
from tracing.clock import Clock

PATHS = {
    "chat": "/chat/completions",
    "completions": "/completions",
    "responses": "/responses",
    "messages": "/messages",
}

OPTIONAL_USAGE = frozenset({"chat", "completions"})
"""Streams that count tokens only for a client that asks; the others always do."""


class Arrival(msgspec.Struct, frozen=True):
    """An event of a stream, as it was read."""

    at_ns: int
    """After its last byte was read: the gateway had handed it over before."""
    data: bytes
    """Without `data:` and the blank line."""

    @property
    def fields(self) -> dict[str, Any]:
        """The JSON in it; empty where there is none."""
        try:
            found = json.loads(self.data)
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    @property
    def text(self) -> str:
        """Its visible text."""
        return text_in(self.fields)

    @property
    def reasoning(self) -> str:
        """Its reasoning text."""
        return reasoning_in(self.fields)


class Answer(msgspec.Struct):
    """What came of one request. Instants are monotonic ns of this host; 0: not reached."""

    sent_ns: int = 0
    """Before anything was written."""
    status: int = 0
    headers: dict[str, str] = {}
    """Names in lower case."""
    headers_ns: int = 0
    body: bytes = b""
    reads: list[tuple[int, int]] = []
    """(instant, bytes) of every read."""
    events: list[Arrival] = []
    ended_ns: int = 0
    """After the last byte was read."""
    left_ns: int = 0
    """Before the client closed its connection."""
    broken: str | None = None
    """How the connection broke off, where it did."""

    @property
    def token_events(self) -> list[Arrival]:
        """Events that carried text or reasoning."""
        return [event for event in self.events if event.text or event.reasoning]

    @property
    def text(self) -> str:
        """All visible text."""
        if self.events:
            return "".join(event.text for event in self.events)
        return text_in(self.json)

    @property
    def json(self) -> dict[str, Any]:
        """The body of a whole answer; empty where it is no JSON object."""
        try:
            found = json.loads(self.body)
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    @property
    def usages(self) -> list[dict[str, Any]]:
        """Every count of tokens that came, in chat's names."""
        found = [usage_in(event.fields) for event in self.events] if self.events else [usage_in(self.json)]
        return [usage for usage in found if usage is not None]

    @property
    def errors(self) -> list[dict[str, Any]]:
        """Every event (or body) that is an error."""
        found = [event.fields for event in self.events] if self.events else [self.json]
        return [fields for fields in found if is_error(fields)]

    @property
    def done(self) -> bool:
        """`[DONE]` came."""
        return any(event.data == b"[DONE]" for event in self.events)


Leave = Callable[[Answer], bool]
"""Whether the client leaves now; asked after every read."""


class Client:
    """Asks one gateway. `async with` it."""

    def __init__(
        self, base_url: str, key: str | None, model: str, clock: Clock, *, patience_seconds: float = 120
    ) -> None:
        self.model = model
        self._patience_seconds = patience_seconds
        self._base_url = base_url.rstrip("/")
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._clock = clock
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> Client:
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=self._patience_seconds),
            read_bufsize=2**22,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def ask(
        self,
        script: Script,
        *,
        surface: str = "chat",
        stream: bool = True,
        usage: bool = False,
        leave: Leave | None = None,
        headers: dict[str, str] | None = None,
    ) -> Answer:
        """One request to its end, or until the client leaves. What breaks or takes too long is noted, not raised.

        Cancelling the task that waits for it closes the connection too, and `left_ns` says when.
        """
        asks = usage and stream and surface in OPTIONAL_USAGE
        more: dict[str, Any] = {"stream_options": {"include_usage": True}} if asks else {}
        body = json.dumps(body_of(script, self.model, surface, stream=stream, **more), ensure_ascii=False).encode()
        return await self.post(PATHS[surface], body, leave=leave, headers=headers)

    async def post(
        self, path: str, body: bytes, *, leave: Leave | None = None, headers: dict[str, str] | None = None
    ) -> Answer:
        """The same for a body of the caller's."""
        answer = Answer(sent_ns=self._clock.mono_ns(), reads=[], events=[])
        try:
            async with self._session.post(
                self._base_url + path, data=body, headers={"content-type": "application/json", **(headers or {})}
            ) as response:
                answer.headers_ns = self._clock.mono_ns()
                answer.status = response.status
                answer.headers = {name.lower(): readable(value) for name, value in response.headers.items()}
                await read_answer(response, answer, self._clock, leave)
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            answer.broken = type(error).__name__
            answer.ended_ns = self._clock.mono_ns()
        return answer

    async def leave_before_answer(self, script: Script, asked: Callable[[], Any], **options: Any) -> Answer:
        """Asks, waits until `asked()` has come true (an awaitable), and leaves."""
        answer = Answer(sent_ns=self._clock.mono_ns(), reads=[], events=[])
        asking = asyncio.create_task(self.ask(script, **options))
        try:
            await asked()
            answer.left_ns = self._clock.mono_ns()
        finally:
            asking.cancel()
            with suppress(asyncio.CancelledError):
                await asking
        return answer


async def read_answer(
    response: aiohttp.ClientResponse, answer: Answer, clock: Clock, leave: Leave | None = None
) -> None:
    """Reads the body into `answer` as it comes, event by event, until its end or until the client leaves."""
    splitter = EventSplitter() if response.content_type == "text/event-stream" else None
    pieces: list[bytes] = []
    while data := await response.content.readany():
        now = clock.mono_ns()
        pieces.append(data)
        answer.reads.append((now, len(data)))
        for event in splitter.feed(data) if splitter else ():
            if (found := event_data(event)) is not None:
                answer.events.append(Arrival(now, found))
        if leave is not None and leave(answer):
            answer.left_ns = clock.mono_ns()
            response.close()
            break
    answer.body = b"".join(pieces)
    answer.ended_ns = clock.mono_ns()
    if splitter and (found := event_data(splitter.flush())) is not None:
        answer.events.append(Arrival(answer.ended_ns, found))
