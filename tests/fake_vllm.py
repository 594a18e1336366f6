"""Stands in for `vllm serve`: takes its documented flags and no others, answers like it, exports a span as it does.

The stages that its spans tell are fixed (STAGES_S), so that a test knows what must come out at the other end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import sys
import time

import aiohttp
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

STAGES_S = {"time_in_queue": 0.004, "time_in_model_prefill": 0.010, "time_in_model_decode": 0.012}
LOADING_SECONDS = 0.3
TOKENS = ("Hel", "lo", "!")


def arguments() -> argparse.Namespace:
    """As `vllm serve` 0.30 documents them."""
    parser = argparse.ArgumentParser(prog="vllm", allow_abbrev=False)
    serve = parser.add_subparsers(required=True).add_parser("serve", allow_abbrev=False)
    serve.add_argument("model")
    for name in ("served-model-name", "host", "uds", "otlp-traces-endpoint", "override-generation-config", "tokenizer"):
        serve.add_argument(f"--{name}")
    for name in (
        "port", "tensor-parallel-size", "pipeline-parallel-size", "max-model-len", "block-size", "max-num-seqs",
        "max-num-batched-tokens",
    ):  # fmt: skip
        serve.add_argument(f"--{name}", type=int)
    serve.add_argument("--gpu-memory-utilization", type=float)
    serve.add_argument("--dtype", choices=["auto", "half", "float16", "bfloat16", "float", "float32"])
    serve.add_argument("--scheduling-policy", choices=["fcfs", "priority"])
    serve.add_argument("--uvicorn-log-level", choices=["debug", "info", "warning", "error", "critical", "trace"])
    for name in ("enable-chunked-prefill", "async-scheduling", "enable-prefix-caching"):
        serve.add_argument(f"--{name}", action=argparse.BooleanOptionalAction)
    for name in ("enable-prompt-tokens-details", "disable-uvicorn-access-log"):
        serve.add_argument(f"--{name}", action="store_true")
    return parser.parse_args()


class FakeVllm:
    def __init__(self, asked: argparse.Namespace) -> None:
        self._asked = asked
        self._key = os.environ.get("VLLM_API_KEY")

    async def health(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def metrics(self, _request: web.Request) -> web.Response:
        return web.Response(text='# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{engine="0"} 0.0\n')

    async def chat(self, request: web.Request) -> web.StreamResponse:
        arrived_ns = time.time_ns()
        if self._key and request.headers.get("authorization") != f"Bearer {self._key}":
            return web.json_response({"error": {"message": "Unauthorized"}}, status=401)
        body = await request.json()
        if body["model"] != self._asked.served_model_name:
            return web.json_response({"error": {"message": f"no model {body['model']}"}}, status=404)
        usage = {"prompt_tokens": 7, "completion_tokens": len(TOKENS), "total_tokens": 7 + len(TOKENS)}
        await asyncio.sleep(STAGES_S["time_in_queue"] + STAGES_S["time_in_model_prefill"])
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        for number, token in enumerate(TOKENS):
            await asyncio.sleep(STAGES_S["time_in_model_decode"] / 2 if number else 0)
            await answer.write(self._event({"delta": {"content": token}, "finish_reason": None}))
        await answer.write(self._event({"delta": {}, "finish_reason": "stop"}))
        await answer.write(self._event(None, usage) + b"data: [DONE]\n\n")
        await self._export(request.headers, arrived_ns)
        return answer

    def _event(self, choice: dict | None, usage: dict | None = None) -> bytes:
        choices = [{"index": 0, **choice}] if choice else []
        event = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "model": "m", "choices": choices}
        return b"data: " + json.dumps(event | ({"usage": usage} if usage else {})).encode() + b"\n\n"

    async def _export(self, headers: dict[str, str], arrived_ns: int) -> None:
        endpoint = self._asked.otlp_traces_endpoint
        if not endpoint or os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") != "http/protobuf":
            return
        _, trace_id, parent_id, _ = headers["traceparent"].split("-")
        made = ExportTraceServiceRequest()
        spans = made.resource_spans.add()
        resource = dict(pair.split("=") for pair in os.environ["OTEL_RESOURCE_ATTRIBUTES"].split(","))
        for key, value in {"service.name": os.environ["OTEL_SERVICE_NAME"], **resource}.items():
            spans.resource.attributes.add(key=key).value.string_value = value
        span = spans.scope_spans.add().spans.add()
        span.trace_id, span.parent_span_id = bytes.fromhex(trace_id), bytes.fromhex(parent_id)
        span.span_id, span.name, span.kind = secrets.token_bytes(8), "llm_request", 2
        span.start_time_unix_nano, span.end_time_unix_nano = arrived_ns, time.time_ns()
        for key, value in STAGES_S.items():
            span.attributes.add(key=f"gen_ai.latency.{key}").value.double_value = value
        async with aiohttp.ClientSession() as session:
            await session.post(
                endpoint, data=made.SerializeToString(), headers={"content-type": "application/x-protobuf"}
            )


async def main() -> None:
    asked = arguments()
    print(f"(APIServer pid={os.getpid()}) INFO loading {asked.model}", flush=True)
    if "FAKE_VLLM_FAILS" in os.environ:
        print("(EngineCore pid=1) ValueError: No available memory for the cache blocks.", flush=True)
        sys.exit("RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}")
    await asyncio.sleep(LOADING_SECONDS)
    fake = FakeVllm(asked)
    app = web.Application()
    app.router.add_get("/health", fake.health)
    app.router.add_get("/metrics", fake.metrics)
    app.router.add_get("/v1/models", fake.health)
    app.router.add_post("/v1/chat/completions", fake.chat)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.UnixSite(runner, asked.uds) if asked.uds else web.TCPSite(runner, asked.host, asked.port)
    await site.start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
