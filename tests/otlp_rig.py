"""An OTLP/HTTP backend that remembers the spans it was sent."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Received(NamedTuple):
    """A span and the service that it came from."""

    service: str
    span: Span

    @property
    def attributes(self) -> dict[str, object]:
        return {a.key: getattr(a.value, a.value.WhichOneof("value") or "string_value") for a in self.span.attributes}


class Backend:
    """The spans so far, in the order of arrival."""

    def __init__(self) -> None:
        self.spans: list[Received] = []
        self.url = ""

    def take(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = next((a.value.string_value for a in resource.resource.attributes if a.key == "service.name"), "")
            self.spans += [Received(service, span) for scope in resource.scope_spans for span in scope.spans]

    def trace(self, trace_id: str, until: str, wait_s: float = 15) -> list[Received]:
        """The spans of a trace, once one named `until` is among them and no more come for half a second."""
        deadline = time.monotonic() + wait_s
        seen = -1
        while time.monotonic() < deadline:
            found = [r for r in self.spans if r.span.trace_id.hex() == trace_id]
            if any(r.span.name == until for r in found) and len(found) == seen:
                return found
            seen = len(found)
            time.sleep(0.5)
        raise AssertionError(f"no span {until!r} in {[r.span.name for r in self.spans]}")


@contextmanager
def otlp_backend() -> Iterator[Backend]:
    """A backend on a free port."""
    backend = Backend()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            if self.path == "/v1/traces":
                backend.take(body)
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    backend.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield backend
    finally:
        server.shutdown()
        server.server_close()
