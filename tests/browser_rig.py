"""A headless Chromium that a test drives by the DevTools protocol. It needs nothing but the browser."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PATIENCE_SECONDS = 30


class Browser:
    """One page of a browser. `faults` is what its console complained of."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._number = 0
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._loaded = asyncio.Event()
        self.faults: list[str] = []

    async def read(self) -> None:
        """Takes what the browser tells; runs until the browser is gone."""
        async for message in self._socket:
            found = message.json()
            if "id" in found:
                self._answers.pop(found["id"]).set_result(found)
            else:
                self._take(found["method"], found["params"])

    def _take(self, method: str, params: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self._loaded.set()
        elif method == "Runtime.exceptionThrown":
            self.faults.append(str(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.faults.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.faults.append(str(params["args"]))

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol, and its result."""
        self._number += 1
        number, answer = self._number, asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        await self._socket.send_json({"id": number, "method": method, "params": params})
        found = await asyncio.wait_for(answer, PATIENCE_SECONDS)
        assert "error" not in found, (method, found["error"])
        result: dict[str, Any] = found["result"]
        return result

    async def after_load(self, act: Callable[[], Any]) -> None:
        """Does something that brings another page, and waits until that is there."""
        self._loaded.clear()
        await act()
        await asyncio.wait_for(self._loaded.wait(), PATIENCE_SECONDS)

    async def go(self, url: str) -> None:
        await self.after_load(lambda: self.call("Page.navigate", url=url))

    async def value(self, script: str) -> Any:
        """What an expression comes to in the page. (The page's own policy does not bind the protocol.)"""
        found = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def look(self, *, width: int, height: int = 1280, dark: bool = False, scale: float = 1) -> None:
        """The size of the window, and light or dark."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 600}
        await self.call("Emulation.setDeviceMetricsOverride", **metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", media="", features=[scheme])

    async def picture(self, *, whole: bool = True) -> bytes:
        """The page as PNG."""
        found = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(found["data"])


@contextlib.asynccontextmanager
async def browser(profile: Path) -> AsyncIterator[Browser]:
    """A browser with a profile of its own; it ends with the block."""
    assert CHROMIUM is not None, "no Chromium here"
    process = await asyncio.create_subprocess_exec(
        CHROMIUM,
        "--headless",
        "--hide-scrollbars",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--no-proxy-server",
        f"--user-data-dir={profile}",
        "--remote-debugging-port=0",
        "about:blank",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        async with aiohttp.ClientSession() as session:
            address = await _page_address(session, profile / "DevToolsActivePort")
            async with session.ws_connect(address, max_msg_size=64 * 2**20) as socket:
                page = Browser(socket)
                reading = asyncio.create_task(page.read())
                try:
                    for domain in ("Page", "Runtime", "Log", "Network"):
                        await page.call(f"{domain}.enable")
                    yield page
                finally:
                    reading.cancel()
                    await asyncio.wait([reading])
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def _page_address(session: aiohttp.ClientSession, port_file: Path) -> str:
    """The WebSocket of the browser's first page."""
    deadline = asyncio.get_running_loop().time() + PATIENCE_SECONDS
    while asyncio.get_running_loop().time() < deadline:
        with contextlib.suppress(FileNotFoundError, IndexError, aiohttp.ClientError):
            port = port_file.read_text().splitlines()[0]
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                pages = [one for one in await answer.json() if one["type"] == "page"]
                return str(pages[0]["webSocketDebuggerUrl"])
        await asyncio.sleep(0.05)
    raise AssertionError(f"the browser did not open its DevTools port within {PATIENCE_SECONDS} s")
