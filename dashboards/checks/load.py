"""A short load that leaves something to see in every panel: short and long prompts, whole answers, clients that leave,
a model whose first upstream is dead, a key beyond its limit, a stranger."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping

import httpx

USERS = 6
MIN_REQUESTS = 700
"""Fewer leave the slowest 1 % without a line: a slow machine is asked for longer."""
MAX_TIMES_LONGER = 3
LONG_WORDS = 700


class Load:
    """Asks for `seconds`, and longer until `least` were sent; `sent` counts them."""

    def __init__(
        self,
        base_url: str,
        *,
        keys: Mapping[str, str],
        models: tuple[str, ...],
        seconds: float,
        users: int = USERS,
        least: int = 0,
        seed: int = 1,
    ) -> None:
        """`keys`: secrets by what they are for: `free`, `other` (another team) and `limited`. `least`: requests."""
        self._base_url = base_url
        self._keys = keys
        self._models = models
        self._seconds = seconds
        self._users = users
        self._least = least
        self._is_stopped = False
        self._random = random.Random(seed)  # noqa: S311  a mix of requests, no secret
        self.sent = 0

    def run(self) -> None:
        """Until the time is over and every request has ended."""
        asyncio.run(self._run())

    async def _run(self) -> None:
        began = time.monotonic()
        client = httpx.AsyncClient(base_url=self._base_url, timeout=60, trust_env=False)
        async with client, asyncio.TaskGroup() as users:
            for _ in range(self._users):
                users.create_task(self._user(client, began))

    async def _user(self, client: httpx.AsyncClient, began: float) -> None:
        while self._goes_on(time.monotonic() - began):
            await self._one(client)
            self.sent += 1

    def stop(self) -> None:
        """No more requests are begun. May be called from another thread."""
        self._is_stopped = True

    def _goes_on(self, passed: float) -> bool:
        longest = self._seconds * (MAX_TIMES_LONGER if self.sent < self._least else 1)
        return passed < longest and not self._is_stopped

    async def _one(self, client: httpx.AsyncClient) -> None:
        drawn = self._random.random()
        key = self._keys["other" if drawn < 0.3 else "free"]
        body = self._body(stream=drawn > 0.1, long=drawn > 0.9)
        headers = {"authorization": f"Bearer {key}"}
        if 0.30 < drawn < 0.33:
            headers = {"authorization": f"Bearer {self._keys['limited']}"}
        elif 0.33 < drawn < 0.35:
            headers = {"authorization": "Bearer nobody"}
        elif 0.35 < drawn < 0.37:
            body["model"] = self._models[-1]
        elif 0.37 < drawn < 0.38:
            body["n"] = 2
        leaves = 0.38 < drawn < 0.42
        if leaves:
            body["max_tokens"] = 400
        try:
            async with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
                async for _ in answer.aiter_bytes():
                    if leaves:
                        return
        except httpx.HTTPError:
            return  # an error is seen in the gateway's own figures

    def _body(self, *, stream: bool, long: bool) -> dict[str, object]:
        # Beginnings are alike, so that the prefix cache has something to hit.
        words = "You answer in one short sentence and nothing else, as politely as can be. " * 2
        if long:
            words += " ".join(f"w{self._random.randrange(10_000)}" for _ in range(LONG_WORDS))
        return {
            "model": self._models[0],
            "messages": [{"role": "user", "content": f"{words} {self._random.random()}"}],
            "max_tokens": self._random.randrange(4, 24),
            "stream": stream,
            **({"stream_options": {"include_usage": True}} if stream else {}),
        }
