"""`verify` passes Tokenline as it is, and finds each fault in gateways that have it."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from loadtest.conformance.finding import Report
from loadtest.conformance.page import read_page
from loadtest.conformance.published import KINDS
from loadtest.conformance.verify import CHECKS, Asked, NotReached, verify
from tracing.clock import SystemClock

TOKENLINE = str(Path(sys.executable).with_name("tokenline"))


def test_tokenline_itself_passes_and_says_so_as_json() -> None:
    done = subprocess.run(
        [TOKENLINE, "verify", "--self", "--surfaces", "chat", "--json"],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    report = json.loads(done.stdout)
    assert [finding for finding in report["findings"] if finding["result"] != "pass"] == []
    assert (done.returncode, report["ok"], report["failed"]) == (0, True, 0)
    assert report["passed"] > 100
    assert {"ttft", "tpot", "e2e", "input tokens", "output tokens", "requests"} == set(report["published"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--base-url URL or --self"),
        (["--base-url", "127.0.0.1:80"], "must be like http://"),
        (["--base-url", "http://127.0.0.1:1", "--key-env", "NO_SUCH_KEY"], "NO_SUCH_KEY"),
        (["--self", "--surfaces", "chat,embeddings"], "embeddings"),
    ],
)
def test_a_slip_on_the_command_line_is_named(arguments: list[str], message: str) -> None:
    done = subprocess.run([TOKENLINE, "verify", *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert message in done.stderr


class FaultyGateway:
    """A gateway with one fault. Its page tells TTFT and duration; everything else it does well enough."""

    def __init__(self, fault: str) -> None:
        self.fault = fault
        self.upstream = ""
        self.url = ""
        registry = CollectorRegistry()
        self._registry = registry
        self._ttft = Histogram("gen_ai_server_time_to_first_token_seconds", "x", registry=registry)
        self._e2e = Histogram("gen_ai_server_request_duration_seconds", "x", registry=registry)
        self._session: aiohttp.ClientSession
        self._detached: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[FaultyGateway]:
        app = web.Application(client_max_size=2**26)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/v1/{path:.*}", self._forward)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        async with aiohttp.ClientSession(read_bufsize=2**22) as self._session:
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            try:
                yield self
            finally:
                for task in self._detached:
                    task.cancel()
                await asyncio.gather(*self._detached, return_exceptions=True)
                await runner.cleanup()

    async def _metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._registry))

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        began = time.perf_counter()
        body = await request.read()
        if self.fault == "hangs on":
            # A task of its own goes on reading the upstream after the client has left.
            task = asyncio.create_task(self._drain(request, body))
            self._detached.add(task)
        url = f"{self.upstream}/{request.match_info['path']}"
        async with self._session.post(url, data=body) as upstream:
            response = web.StreamResponse(status=upstream.status, headers={"content-type": upstream.content_type})
            first = 0.0
            held = b""
            await response.prepare(request)
            async for data in self._pieces(upstream):
                if not first and (b'"content": "w' in data or self.fault == "any event is a token"):
                    first = time.perf_counter() - began
                if self.fault == "buffers":
                    held += data
                    continue
                if self.fault == "doubles usage":
                    data = b"".join(
                        part * (1 + (b'"usage"' in part)) for part in re.findall(rb".*?\n\n|.+$", data, re.S)
                    )
                await response.write(data)
            if held:
                await response.write(held)
            took = time.perf_counter() - began
            if upstream.content_type == "text/event-stream":
                self._ttft.observe(took if self.fault == "TTFT is the total" else first)
            elif self.fault == "TTFT of whole answers":
                self._ttft.observe(took)
            self._e2e.observe(took * 1e3 if self.fault == "milliseconds" else took)
            await response.write_eof()
            return response

    async def _pieces(self, upstream: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        try:
            async for data in upstream.content.iter_any():
                yield data
        except aiohttp.ClientError as error:
            if self.fault == "says nothing of a cut":
                yield b"data: [DONE]\n\n"
            else:
                yield b"data: " + json.dumps({"error": {"message": str(error)}}).encode() + b"\n\n"

    async def _drain(self, request: web.Request, body: bytes) -> None:
        async with self._session.post(f"{self.upstream}/{request.match_info['path']}", data=body) as upstream:
            await upstream.read()


async def report_of(fault: str, *, page: bool) -> Report:
    async with FaultyGateway(fault).serving() as gateway:

        async def point(url: str) -> None:
            gateway.upstream = url

        asked = Asked(
            f"{gateway.url}/v1", "m", metrics_url=f"{gateway.url}/metrics" if page else None, surfaces=("chat",)
        )
        return await verify(asked, SystemClock(), on_upstream=point, progress=lambda *_: None)


@pytest.mark.parametrize(
    ("fault", "checks", "check"),
    [
        ("buffers", ["forwarding"], "spacing kept (no buffering)"),
        ("buffers", ["client leaves"], "in the stream"),
        ("hangs on", ["client leaves"], "in the stream"),
        ("doubles usage", ["usage"], "sent once"),
        ("says nothing of a cut", ["errors"], "connection cut in the stream"),
    ],
)
async def test_a_fault_on_the_wire_is_found(
    monkeypatch: pytest.MonkeyPatch, fault: str, checks: list[str], check: str
) -> None:
    for module in ("failures", "verify"):
        monkeypatch.setattr(f"loadtest.conformance.{module}.PATIENCE_SECONDS", 1.0)
    monkeypatch.setattr("loadtest.conformance.verify.CHECKS", [one for one in CHECKS if one[0] in checks])
    report = await report_of(fault, page=False)
    assert check in {finding.check for finding in report.failed}
    sound = await report_of("none", page=False)
    assert check not in {finding.check for finding in sound.failed}


@pytest.mark.parametrize(
    ("fault", "kind", "check"),
    [
        ("TTFT is the total", "several tokens in one event", "page: ttft"),
        ("any event is a token", "role-only first event, slow first token", "page: ttft"),
        ("TTFT of whole answers", "whole", "page: ttft samples"),
        ("milliseconds", "stream", "page: e2e"),
    ],
)
async def test_a_published_figure_that_is_wrong_is_found_and_by_how_much(
    monkeypatch: pytest.MonkeyPatch, fault: str, kind: str, check: str
) -> None:
    monkeypatch.setattr("loadtest.conformance.verify.CHECKS", [])
    monkeypatch.setattr("loadtest.conformance.verify.KINDS", [one for one in KINDS if one.name == kind])
    report = await report_of(fault, page=True)
    (found,) = [finding for finding in report.failed if finding.check == check]
    if "samples" not in check:
        assert found.off_ms is not None
        low_ms, _, high_ms, _ = found.wanted.split()
        bound_ms = float(high_ms) if found.off_ms > 0 else float(low_ms)
        assert found.off_ms == pytest.approx(float(found.seen.split()[0]) - bound_ms, abs=0.1)
    sound = await report_of("none", page=True)
    assert check not in {finding.check for finding in sound.failed}


async def test_a_gateway_that_leads_elsewhere_is_said_to_with_its_answer() -> None:
    async with FaultyGateway("none").serving() as gateway:

        async def point(_url: str) -> None:
            gateway.upstream = f"{gateway.url}/v2"

        asked = Asked(f"{gateway.url}/v1", "m", wait_seconds=0.2)
        with pytest.raises(NotReached, match="404"):
            await verify(asked, SystemClock(), on_upstream=point, progress=lambda *_: None)


def test_pages_of_several_makers_are_read() -> None:
    reading = read_page(
        "# TYPE litellm_request_total_latency_metric histogram\n"
        'litellm_request_total_latency_metric_bucket{le="+Inf",model="a"} 2.0\n'
        'litellm_request_total_latency_metric_count{model="a"} 2.0\n'
        'litellm_request_total_latency_metric_sum{model="a"} 3.5\n'
        "# TYPE litellm_output_tokens_metric counter\n"
        'litellm_output_tokens_metric_total{model="a"} 9.0\n'
        'litellm_output_tokens_metric_total{model="b"} 1.0\n'
        "# TYPE vllm:time_to_first_token_seconds histogram\n"
        "vllm:time_to_first_token_seconds_count 1.0\n"
        "vllm:time_to_first_token_seconds_sum 0.25\n"
    )
    assert reading.counts == {"e2e": 2, "output tokens": 10, "ttft": 1}
    assert reading.sums == {"e2e": 3.5, "ttft": 0.25}
    assert reading.names["output tokens"] == "litellm_output_tokens_metric_total"
