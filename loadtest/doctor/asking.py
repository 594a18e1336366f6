"""Asks the endpoint as a client would, and notes when what came."""

from __future__ import annotations

import asyncio
import html
import re
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp
import msgspec

from loadtest.conformance.client import Answer, read_answer
from loadtest.doctor.given import Surface, masked
from loadtest.stream import readable, shown
from tracing.clock import Clock

MAX_BODY_BYTES = 8 * 2**20
TICK_SECONDS = 0.005
_TITLE = re.compile(rb"<title[^>]*>(.*?)</title>", re.IGNORECASE | re.DOTALL)


class Reply(Answer):
    """An answer, or why there is none."""

    url: str = ""
    said: str = ""
    """How the connection failed, in the library's words, secrets masked."""
    wall_ns: int = 0
    """The wall clock halfway between sending and the status line."""
    lag_ms: float = 0.0
    """The longest time for which this process was too busy to read."""

    @property
    def is_html(self) -> bool:
        start = self.body[:512].lstrip().lower()
        kind = self.headers.get("content-type", "")
        return "text/html" in kind or start.startswith((b"<!doctype html", b"<html"))

    @property
    def is_json(self) -> bool:
        """Whether the body is a JSON object."""
        return bool(self.json) or self.body.strip() == b"{}"

    @property
    def error(self) -> dict[str, Any]:
        """The error object in OpenAI's or Anthropic's shape; empty where there is none."""
        found = self.json.get("error")
        if isinstance(found, dict):
            return found
        if isinstance(found, str):
            return {"message": found}
        told = next((self.json[name] for name in ("message", "detail") if isinstance(self.json.get(name), str)), None)
        return {"message": told} if told else {}

    @property
    def code(self) -> str:
        """The error's code, else its type."""
        return str(self.error.get("code") or self.error.get("type") or "")

    @property
    def title(self) -> str:
        """Of an HTML page."""
        found = _TITLE.search(self.body[:65536])
        return html.unescape(shown(found[1])) if found else ""

    @property
    def server(self) -> str:
        """What stands between, or answers, by its own word: `Server` and `Via`."""
        return ", ".join(self.headers[name] for name in ("server", "via") if self.headers.get(name))

    @property
    def date_s(self) -> float | None:
        """The server's clock when it answered, seconds since 1970, whole seconds."""
        try:
            return parsedate_to_datetime(self.headers.get("date", "")).timestamp()
        except (ValueError, TypeError):
            return None


class Asker:
    """A client of one endpoint. `async with` it."""

    def __init__(
        self,
        surface: Surface,
        key: str,
        clock: Clock,
        *,
        as_bearer: bool,
        proxy: str | None,
        timeout_seconds: float,
    ) -> None:
        self.surface: Surface = surface
        self.proxy = proxy
        self._key = key
        self._clock = clock
        self._timeout_seconds = timeout_seconds
        self._credentials: dict[str, str] = {}
        if key:
            self._credentials = {"authorization": f"Bearer {key}"} if as_bearer else {"x-api-key": key}
        self._version = {"anthropic-version": "2023-06-01"} if surface == "anthropic" else {}
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> Asker:
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=self._timeout_seconds),
            cookie_jar=aiohttp.DummyCookieJar(),
            read_bufsize=2**20,
            trust_env=False,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    def url_of(self, base_url: str, path: str) -> str:
        """Where the surface's SDK asks: OpenAI's appends the path, Anthropic's `/v1` and the path."""
        return base_url + ("/v1" if self.surface == "anthropic" else "") + path

    def shown(self, text: str) -> str:
        """What a server said, in one line, fit to be printed."""
        return masked(shown(text.encode("utf-8", "replace")), self._key)

    async def get(self, url: str, *, with_key: bool = True) -> Reply:
        """What GET gives; a redirect is not followed. Never raises for what the endpoint does."""
        return await self._ask("GET", url, None, {}, with_key=with_key)

    async def post(self, url: str, fields: dict[str, Any]) -> Reply:
        """What POST gives, read as it comes."""
        # A Tokenline gateway then leaves the engine's own times in the answer; others pay no heed.
        more = {"content-type": "application/json", "x-tokenline-timings": "include"}
        return await self._ask("POST", url, msgspec.json.encode(fields), more, with_key=True)

    async def _ask(self, method: str, url: str, body: bytes | None, more: dict[str, str], *, with_key: bool) -> Reply:
        reply = Reply(reads=[], events=[], url=url, sent_ns=self._clock.mono_ns())
        before_wall_ns = self._clock.wall_ns()
        headers = {**more, **self._version, **(self._credentials if with_key else {}), "user-agent": "tokenline-doctor"}
        watch = asyncio.create_task(self._watch_lag(reply))
        try:
            async with self._session.request(
                method, url, data=body, headers=headers, proxy=self.proxy, allow_redirects=False
            ) as response:
                reply.headers_ns = self._clock.mono_ns()
                reply.wall_ns = (before_wall_ns + self._clock.wall_ns()) // 2
                reply.status = response.status
                reply.headers = {name.lower(): readable(value) for name, value in response.headers.items()}
                await read_answer(response, reply, self._clock, lambda so_far: _size(so_far) > MAX_BODY_BYTES)
        except (aiohttp.ClientError, OSError, ValueError, TimeoutError) as error:
            reply.broken = type(error).__name__
            reply.said = self.shown(str(error) or type(error).__name__)
            reply.ended_ns = self._clock.mono_ns()
        finally:
            watch.cancel()
        return reply

    async def _watch_lag(self, reply: Reply) -> None:
        while True:
            began_ns = self._clock.mono_ns()
            await asyncio.sleep(TICK_SECONDS)
            late_ms = (self._clock.mono_ns() - began_ns) / 1e6 - 1e3 * TICK_SECONDS
            reply.lag_ms = max(reply.lag_ms, late_ms)


def _size(answer: Answer) -> int:
    return sum(size for _, size in answer.reads)
