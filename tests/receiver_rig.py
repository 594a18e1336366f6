"""A receiver without a socket, and bodies to send to it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import httpx
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span as ProtoSpan

from tracing.clock import FakeClock
from tracing.observer.receiver import Receiver
from tracing.spans import Span

PROTOBUF = "application/x-protobuf"
JSON = "application/json"
RECORDED = Path(__file__).parents[1] / "data" / "vllm-otlp-span.json"


class Rig:
    """A receiver without a socket."""

    def __init__(self, **options: Any) -> None:
        self.spans: list[Span] = []
        self.counted: Counter[str] = Counter()
        self.anomalies: Counter[str] = Counter()
        self.clock = FakeClock(wall=1_796_000_000_000_000_000)
        receiver = Receiver(self.spans.extend, self._count, self._anomaly, clock=self.clock, **options)
        transport = httpx.ASGITransport(app=receiver.app())
        self.http = httpx.AsyncClient(transport=transport, base_url="http://receiver")

    @property
    def accepted(self) -> int:
        return self.counted["accepted"]

    @property
    def rejected(self) -> int:
        return self.counted["rejected"]

    def _count(self, result: str, count: int) -> None:
        self.counted[result] += count

    def _anomaly(self, kind: str, count: int) -> None:
        self.anomalies[kind] += count

    async def post(self, body: bytes, content_type: str = PROTOBUF, **headers: str) -> httpx.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.http.post("/v1/traces", content=body, headers={"content-type": content_type, **named})


def proto_span(**changes: Any) -> ProtoSpan:
    fields: dict[str, Any] = {
        "trace_id": bytes.fromhex("0af7651916cd43dd8448eb211c80319c"),
        "span_id": bytes.fromhex("347fff261231e6a5"),
        "name": "llm_request",
        "start_time_unix_nano": 1_796_000_000_000_000_000,
        "end_time_unix_nano": 1_796_000_001_000_000_000,
    }
    return ProtoSpan(**(fields | changes))


def request(*spans: ProtoSpan) -> ExportTraceServiceRequest:
    made = ExportTraceServiceRequest()
    holder = made.resource_spans.add()
    holder.resource.attributes.add(key="service.name").value.string_value = "engine"
    scoped = holder.scope_spans.add()
    scoped.scope.name = "scope"
    scoped.scope.version = "2"
    scoped.spans.extend(spans)
    return made
