"""Health checks of upstreams: who is asked, how, and what counts as up."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from settings.schema import Settings
from tracing.observer import health as health_module
from tracing.observer.health import Health, Probe, is_up, probes_of


def settings(**sections: Any) -> Settings:
    return Settings.model_validate({"state_dir": Path("/state"), **sections})


def test_the_engine_is_asked_over_its_socket_and_others_for_their_models() -> None:
    upstreams = [
        {"name": "hosted", "url": "https://api.example.com/v1/", "api_key_env": "HOSTED_KEY"},
        {"name": "near", "unix_socket": "/run/near.sock"},
    ]
    assert probes_of(settings(upstreams=upstreams)) == [
        Probe("engine", "http://engine/health", "/state/run/engine.sock"),
        Probe("hosted", "https://api.example.com/v1/models", None, "HOSTED_KEY"),
        Probe("near", "http://upstream/v1/models", "/run/near.sock"),
    ]


def test_without_an_engine_only_the_others_are_asked() -> None:
    assert probes_of(settings(engine={"backend": "none"})) == []


@pytest.mark.parametrize(("status", "up"), [(200, True), (401, True), (404, True), (500, False), (503, False)])
async def test_any_answer_below_500_is_up(status: int, up: bool) -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(status))
    async with httpx.AsyncClient(transport=transport) as client:
        assert await is_up(client, "http://upstream/v1/models") is up


@pytest.mark.parametrize("error", [httpx.ConnectError("refused"), httpx.ReadTimeout("slow"), OSError("gone")])
async def test_no_answer_is_down(error: Exception) -> None:
    def fail(request: httpx.Request) -> httpx.Response:
        raise error

    async with httpx.AsyncClient(transport=httpx.MockTransport(fail)) as client:
        assert await is_up(client, "http://upstream/v1/models") is False


async def test_probes_follow_the_settings_and_those_that_stay_are_not_disturbed(monkeypatch) -> None:
    asked: list[tuple[str, str]] = []
    reports: list[tuple[str, bool | None]] = []

    async def answer(client: httpx.AsyncClient, url: str) -> bool:
        asked.append(("asked", url))
        return True

    monkeypatch.setattr(health_module, "is_up", answer)
    health = Health([Probe("a", "http://a"), Probe("b", "http://b")], lambda *report: reports.append(report), {})
    running = asyncio.create_task(health.run())
    try:
        await until(lambda: len(reports) == 2)
        health.follow([Probe("a", "http://a"), Probe("c", "http://c")])
        await until(lambda: len(reports) == 4)
        assert sorted(reports[2:], key=str) == [("b", None), ("c", True)]
        assert [url for _, url in asked].count("http://a") == 1
        health.follow([Probe("a", "http://elsewhere")])
        await until(lambda: len(reports) == 6)
        assert sorted(reports[4:], key=str) == [("a", True), ("c", None)]
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def until(holds: Any) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.001)
