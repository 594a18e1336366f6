"""Traps that comparable systems fell into and that no other test here names."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest
from conformance_rig import KEY, MODEL, Bench, bench

from loadtest.conformance.client import PATHS
from loadtest.scripted.script import Script, body_of
from tracing.ledger import Closed
from tracing.metrics import CATALOGUE

ROOT = Path(__file__).parents[2]


async def raw_answer(b: Bench, script: Script, surface: str = "chat") -> bytes:
    """Every byte that the gateway sends for one stream, from a client that would take compression."""
    body = json.dumps(body_of(script, MODEL, surface, stream=True)).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", b.settings.server.port)
    writer.write(
        f"POST /v1{PATHS[surface]} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\nconnection: close\r\n"
        f"accept-encoding: gzip, br, zstd\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        + body
    )
    async with asyncio.timeout(20):
        answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.parametrize("surface", PATHS)
async def test_a_stream_is_not_compressed_and_tells_proxies_not_to_buffer_it(tmp_path: Path, surface: str) -> None:
    async with bench(tmp_path) as b:
        head = (await raw_answer(b, Script(id="1"), surface)).partition(b"\r\n\r\n")[0].lower()
        assert b"content-encoding" not in head
        assert b"x-accel-buffering: no" in head
        assert b"cache-control: no-cache" in head


@pytest.mark.parametrize("surface", PATHS)
async def test_an_event_is_with_the_client_before_the_upstream_thinks_of_the_next(tmp_path: Path, surface: str) -> None:
    """The upstream never writes a second token: whoever held the first one back would hold it for ever."""
    async with bench(tmp_path) as b:
        script = Script(id="1", gap_ms=60_000, role_event=False)
        async with asyncio.timeout(20):
            answer = await b.client.ask(script, surface=surface, leave=lambda a: bool(a.token_events))
        (written,) = b.stage.attempts("1")[0].token_events
        assert len(answer.token_events) == 1
        assert answer.token_events[0].at_ns >= written.last_ns


@pytest.mark.parametrize("surface", PATHS)
@pytest.mark.parametrize("end", ["error_mid", "cut_mid"])
async def test_an_error_after_the_stream_began_is_one_event_and_no_second_status(
    tmp_path: Path, surface: str, end: str
) -> None:
    async with bench(tmp_path) as b:
        answer = await raw_answer(b, Script(id="1", end=end), surface)  # type: ignore[arg-type]
        assert answer.count(b"HTTP/1.1 ") == 1
        assert b"<html" not in answer.lower()
        assert answer.endswith(b"0\r\n\r\n"), "the body ends as HTTP wants it, not with a cut connection"
        seen = await b.client.ask(Script(id="2", end=end), surface=surface)  # type: ignore[arg-type]
        assert len(seen.errors) == 1
        assert seen.broken is None


async def test_a_silent_upstream_gets_no_keep_alive_from_the_gateway(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        answer = await b.client.ask(Script(id="1", gap_ms=400, tokens=2))
        written = b"".join(one.data for one in b.stage.attempts("1")[0].writes if one.what != "usage")
        assert answer.body == written


async def test_one_page_has_the_total_of_all_workers_and_never_jumps_between_them(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        await b.client.ask(Script(id="1"))
        ledger = await b.ledger()
        for number in range(1, 4):
            ledger.worker, ledger.request_id = number, f"req_of_worker_{number}"
            b.observer.take_records([Closed(ledger)])
            b.end_waits()
            counted = {
                name: value for name, value in b.samples().items() if name.startswith("tokenline_requests_total")
            }
            assert list(counted.values()) == [number + 1]
            assert "worker" not in next(iter(counted))


def test_every_latency_is_a_histogram_so_that_percentiles_come_from_rates() -> None:
    allowed = {"tokenline_oldest_waiting_seconds"}
    for metric in CATALOGUE:
        is_moment = metric.name.endswith("_timestamp_seconds")
        if metric.name.endswith("_seconds") and not is_moment and metric.name not in allowed:
            assert metric.kind == "histogram", metric.name


def test_nothing_that_is_shipped_divides_lifetime_sums_by_lifetime_counts() -> None:
    """`_sum / _count` without rate() is the average since the process started."""
    shipped = [
        path
        for folder in ("dashboards", "docs", "deploy")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".json", ".yml", ".yaml", ".md", ".py", ".html") and path.is_file()
    ]
    assert shipped
    lifetime = re.compile(
        r"(?<!rate\()(?<!increase\()\b(?:tokenline|gen_ai)_\w+_sum\b[^\n]{0,120}/[^\n]{0,120}_count\b"
    )
    found = [str(path.relative_to(ROOT)) for path in shipped if lifetime.search(path.read_text(errors="replace"))]
    assert found == []
