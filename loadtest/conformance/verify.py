"""Verifying a gateway from outside: a scripted upstream behind it, a client before it, and what it says of itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import aiohttp
import msgspec

from loadtest.conformance.client import PATHS, Client
from loadtest.conformance.counts import usage_events
from loadtest.conformance.failures import leaving, upstream_errors
from loadtest.conformance.finding import Finding, Report, judged, skipped
from loadtest.conformance.forwarding import bytes_intact, delays, trace_context
from loadtest.conformance.page import MetricsPage
from loadtest.conformance.played import PATIENCE_SECONDS, Between
from loadtest.conformance.published import KINDS, Kind, Publisher
from loadtest.conformance.records import OpsAccess, Records
from loadtest.scripted.stage import Stage
from loadtest.scripted.upstream import ScriptedUpstream
from tracing.clock import Clock

PROBE_SECONDS = 0.5

Check = Callable[[Between, str], Awaitable[list[Finding]]]
CHECKS: tuple[tuple[str, Check], ...] = (
    ("forwarding", delays),
    ("bytes", bytes_intact),
    ("trace context", trace_context),
    ("usage", usage_events),
    ("errors", upstream_errors),
    ("client leaves", leaving),
)
Progress = Callable[[int, int, str], None]
"""(cases done, cases in all, what runs now)."""


class Asked(msgspec.Struct, frozen=True):
    """What to verify."""

    base_url: str
    """What an OpenAI client would use; `/chat/completions` is appended."""
    model: str
    key: str | None = None
    upstream_host: str = "127.0.0.1"
    upstream_port: int = 0
    metrics_url: str | None = None
    ops: OpsAccess | None = None
    surfaces: tuple[str, ...] = tuple(PATHS)
    wait_seconds: float = 120


class NotReached(Exception):
    """The gateway never asked the scripted upstream; the message has what it answered instead."""


async def verify(
    asked: Asked,
    clock: Clock,
    *,
    on_upstream: Callable[[str], Awaitable[None]],
    progress: Progress,
) -> Report:
    """Everything, in turn. `on_upstream` is told the upstream's URL once it serves, and may point the gateway at it.

    Raises NotReached, OSError where the upstream's port is taken, ConnectionError where a page can't be read.
    """
    stage = Stage()
    async with (
        ScriptedUpstream(stage, clock).serving(asked.upstream_host, asked.upstream_port) as upstream,
        Client(asked.base_url, asked.key, asked.model, clock, patience_seconds=PATIENCE_SECONDS) as client,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session,
    ):
        await on_upstream(upstream.url)
        between = Between(client, stage)
        await _reach(between, asked.wait_seconds, progress)
        publisher = Publisher(
            between,
            MetricsPage(asked.metrics_url, session) if asked.metrics_url else None,
            Records(asked.ops, session) if asked.ops else None,
        )
        findings = await _run(between, publisher, asked, progress)
    return Report(asked.base_url, asked.model, findings, publisher.names)


async def _reach(between: Between, wait_seconds: float, progress: Progress) -> None:
    """Asks until the upstream is asked. Raises NotReached."""
    loop = asyncio.get_running_loop()
    ends_at = loop.time() + wait_seconds
    while True:
        played = await between.play(tokens=1)
        if played.witnesses and played.answer.status == 200:
            return
        answer = played.answer
        seen = answer.broken or f"status {answer.status}: {answer.body[:300].decode('utf-8', 'replace')}"
        if loop.time() >= ends_at:
            raise NotReached(seen)
        progress(0, 0, f"waiting for the gateway to lead to the scripted upstream ({seen[:80]})")
        await asyncio.sleep(PROBE_SECONDS)


async def _run(between: Between, publisher: Publisher, asked: Asked, progress: Progress) -> list[Finding]:
    surfaces = [surface for surface in asked.surfaces if await _serves(between, surface)]
    findings = [
        skipped(f"{surface}: surface", "is served", "the gateway has no such path")
        for surface in asked.surfaces
        if surface not in surfaces
    ]
    kinds: Sequence[Kind] = KINDS if asked.metrics_url or asked.ops else ()
    steps = [(surface, name, check) for surface in surfaces for name, check in CHECKS]
    published = [(surface, kind) for surface in surfaces for kind in kinds if _fits(kind, surface)]
    total = len(steps) + len(published)
    for done, (surface, name, check) in enumerate(steps):
        progress(done, total, f"{surface}: {name}")
        findings += await check(between, surface)
    for done, (surface, kind) in enumerate(published, len(steps)):
        progress(done, total, f"{surface}: published figures, {kind.name}")
        findings += await publisher.check(kind, surface)
    if asked.metrics_url and not publisher.names:
        findings.append(judged("published", "page", False, "no figure that is known", "at least one"))
    progress(total, total, "done")
    return findings


async def _serves(between: Between, surface: str) -> bool:
    """Whether the gateway has the surface at all."""
    played = await between.play(surface=surface, tokens=1)
    return surface == "chat" or played.answer.status not in (400, 404, 405, 501)


def _fits(kind: Kind, surface: str) -> bool:
    return surface != "completions" or not ("reasoning" in kind.name or "role-only" in kind.name)
