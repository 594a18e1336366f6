"""The endpoint under test: its addresses, its key, what it serves, how it counts tokens."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from loadtest.settings import Api
from loadtest.stream import shown
from protocol.headers import REQUEST_ID
from protocol.ids import LOAD_TEST_PREFIX
from settings.errors import SettingsError

ASK_SECONDS = 10.0
_NAMED = {REQUEST_ID: LOAD_TEST_PREFIX + "asks"}
"""What is asked before and after a run is a load test's too."""


class NotAnswered(Exception):
    """The endpoint could not be asked; says why and what to look at."""

    def __init__(self, message: str, *, is_refusal: bool = False) -> None:
        super().__init__(message)
        self.is_refusal = is_refusal
        """It answered, but would not: a wrong key or address."""


class Endpoint:
    """An OpenAI-compatible endpoint as a client is given it: the base_url that SDKs append paths to."""

    def __init__(self, api: Api, key: str | None, session: aiohttp.ClientSession) -> None:
        self.base_url = api.base_url
        parts = urlsplit(api.base_url)
        self._prefix = api.base_url if parts.path.strip("/") else api.base_url + "/v1"
        self.origin = f"{parts.scheme}://{parts.netloc}"
        self.host = parts.hostname or ""
        self.session = session
        # A Tokenline gateway then leaves the engine's own times in the answer; others pay no heed.
        self.headers = {"content-type": "application/json", "x-tokenline-timings": "include"}
        if key:
            self.headers["authorization"] = f"Bearer {key}"

    @property
    def chat_url(self) -> str:
        return self._prefix + "/chat/completions"

    async def models(self) -> list[str]:
        """The models that /models lists. Raises NotAnswered."""
        answer = await self._ask("GET", self._prefix + "/models")
        try:
            return [str(model["id"]) for model in answer["data"]]
        except (KeyError, TypeError):
            raise NotAnswered(f"{self._prefix}/models answered without a list of models") from None

    async def model(self, asked: str | None) -> str:
        """`asked`, else the only model there is. Raises NotAnswered or SettingsError."""
        if asked:
            return asked
        found = await self.models()
        if len(found) == 1:
            return found[0]
        if not found:
            raise SettingsError(f"{self.base_url} lists no model; name one with --model")
        raise SettingsError(
            f"{self.base_url} serves {len(found)} models; name one with --model: {', '.join(found[:20])}"
        )

    async def count_tokens(self, model: str, **what: Any) -> int:
        """Tokens of `messages` or of a `prompt` by the server's own tokenizer. Raises NotAnswered where it has none."""
        # vLLM serves it beside /v1, a gateway under its own prefix.
        answer = await self._ask("POST", self._prefix.removesuffix("/v1") + "/tokenize", {"model": model, **what})
        count = answer.get("count") if isinstance(answer, dict) else None
        if not isinstance(count, int) or count < 0:
            raise NotAnswered("/tokenize answered without a count")
        return count

    async def _ask(self, method: str, url: str, body: Any = None) -> Any:
        data = None if body is None else msgspec.json.encode(body)
        try:
            async with (
                asyncio.timeout(ASK_SECONDS),
                self.session.request(method, url, data=data, headers={**self.headers, **_NAMED}) as response,
            ):
                said = await response.content.read(2**20)
        except TimeoutError:
            raise NotAnswered(f"{url} did not answer within {ASK_SECONDS:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise NotAnswered(f"{url} can't be reached: {error}") from None
        if response.status >= 400:
            raise NotAnswered(f"{url}: {response.status} {shown(said)}", is_refusal=response.status in (401, 403))
        try:
            return msgspec.json.decode(said)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise NotAnswered(f"{url} answered with something that is not JSON: {shown(said)}") from None


def key_of(api: Api, environ: Mapping[str, str]) -> str | None:
    """The key from the variable that the settings name. Raises SettingsError where it is not set."""
    if api.api_key_env is None:
        return None
    key = environ.get(api.api_key_env, "").strip()
    if not key:
        raise SettingsError(
            f"api.api_key_env: the environment variable {api.api_key_env} is not set; it must hold the key for "
            f"{api.base_url}. For a server without keys use --no-key, or null there"
        )
    return key


def fingerprint(key: str | None) -> str | None:
    """Tells two keys apart without telling the key."""
    return None if key is None else hashlib.sha256(b"tokenline-bench:" + key.encode()).hexdigest()[:12]


def open_session() -> aiohttp.ClientSession:
    """Connections without a limit of their own, kept alive, without cookies, proxies by the environment never used."""
    connector = aiohttp.TCPConnector(limit=0, limit_per_host=0, ttl_dns_cache=300, keepalive_timeout=30)
    timeout = aiohttp.ClientTimeout(total=None, connect=None, sock_connect=None, sock_read=None)
    return aiohttp.ClientSession(connector=connector, timeout=timeout, cookie_jar=aiohttp.DummyCookieJar())
