"""The console in one process: an observer whose time the test owns, its ops application, and a browser's manners."""

from __future__ import annotations

import hashlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
from ledgers import WALL_NS
from prometheus_client import CollectorRegistry

from dashboards.console import console
from settings.schema import Settings
from tracing.clock import FakeClock
from tracing.ledger import Closed, Ledger
from tracing.observer.app import ops_app
from tracing.observer.core import Observer
from tracing.observer.scrape import MetricsPage

ADMIN_KEY = "sk-admin-of-the-test"
KEY_HASH = hashlib.sha256(ADMIN_KEY.encode()).digest()
BROWSER = {"accept": "text/html", "sec-fetch-site": "same-origin"}


class ConsoleRig:
    """An observer with a store, and clients of its console. `close` when done."""

    def __init__(self, state_dir: Path, **sections: Any) -> None:
        self.clock = FakeClock(wall=WALL_NS + 60_000_000_000)
        self.settings = Settings.model_validate({"state_dir": state_dir, **sections})
        registry = CollectorRegistry()
        self.observer = Observer(self.settings, self.clock, registry, None)
        self.observer.store.open()
        self.app = ops_app(
            self.observer,
            MetricsPage(registry, self.settings.engine_socket),
            admin_key_hash=KEY_HASH,
            pages=console(KEY_HASH),
        )

    def client(self, address: str = "127.0.0.1", origin: str = "http://ops.test:9464") -> httpx.AsyncClient:
        """A browser that follows nothing by itself."""
        transport = httpx.ASGITransport(self.app, client=(address, 50_000))
        return httpx.AsyncClient(transport=transport, base_url=origin, headers=BROWSER)

    async def logged_in(self, **options: Any) -> httpx.AsyncClient:
        """A browser with a session."""
        client = self.client(**options)
        answer = await client.post("/console/login", data={"key": ADMIN_KEY})
        assert answer.status_code == 303, answer.text
        return client

    def close_request(self, *ledgers: Ledger) -> None:
        """What a worker tells of requests that ended."""
        self.observer.take_records([Closed(ledger) for ledger in ledgers])

    def close(self) -> None:
        self.observer.store.close()


class Page(HTMLParser):
    """A page as a browser reads it: its tags with attributes, and its words."""

    def __init__(self, answer: httpx.Response) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.words: list[str] = []
        self._silent = False
        self.feed(answer.text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attributes}))
        self._silent = tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._silent = False

    def handle_data(self, data: str) -> None:
        if not self._silent and data.strip():
            self.words.append(" ".join(data.split()))

    @property
    def text(self) -> str:
        return " ".join(self.words)

    def all(self, tag: str, **attributes: str) -> list[dict[str, str]]:
        """The attributes of every such tag; `class_` asks for one of the classes."""
        wanted = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()}

        def fits(found: dict[str, str]) -> bool:
            return all(
                value in found.get(name, "").split() if name == "class" else found.get(name) == value
                for name, value in wanted.items()
            )

        return [found for name, found in self.tags if name == tag and fits(found)]
