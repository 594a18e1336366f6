"""Export: kept traces go on to an OTLP backend, with the ids, parents and resources that they came with.

On when OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_EXPORTER_OTLP_ENDPOINT is set; headers, timeout, compression and
certificates come from OpenTelemetry's own variables. The SDK's batch processor owns the queue (bounded, the oldest
leave) and the thread that sends.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from urllib.parse import urlsplit

import msgspec
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, TraceFlags, TraceState
from opentelemetry.trace import SpanKind as OtelKind
from opentelemetry.trace.status import Status, StatusCode

from settings.schema import Settings
from tracing.spans import GATEWAY_RESOURCE, Attributes, Span, SpanKind, SpanStatus

TRACES_ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
MAX_QUEUE_SPANS = 20_000
MAX_RESOURCES = 256
SCHEDULE_DELAY_MS = 500
CLOSE_SECONDS = 5

_KINDS = {
    SpanKind.INTERNAL: OtelKind.INTERNAL,
    SpanKind.SERVER: OtelKind.SERVER,
    SpanKind.CLIENT: OtelKind.CLIENT,
    SpanKind.PRODUCER: OtelKind.PRODUCER,
    SpanKind.CONSUMER: OtelKind.CONSUMER,
}
_STATUSES = {SpanStatus.UNSET: StatusCode.UNSET, SpanStatus.OK: StatusCode.OK, SpanStatus.ERROR: StatusCode.ERROR}

log = logging.getLogger("tokenline.observer.export")


class ExportError(RuntimeError):
    """Export is configured in a way that cannot work; the message names the variable and the fix."""


class _CountingExporter(OTLPSpanExporter):
    """Tells how many traces a batch held that could not be sent, after the SDK's own retries."""

    failed: Callable[[int], None] = staticmethod(lambda traces: None)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = super().export(spans)
        if result is not SpanExportResult.SUCCESS:
            self.failed(len({span.context.trace_id for span in spans if span.context}))
        return result


class Exporter:
    """Hands spans to the SDK. `export` may be called from any thread and never waits."""

    def __init__(self, endpoint: str) -> None:
        self._sender = _CountingExporter(endpoint=endpoint)
        self._processor = BatchSpanProcessor(
            self._sender,
            max_queue_size=MAX_QUEUE_SPANS,
            schedule_delay_millis=SCHEDULE_DELAY_MS,
        )
        self._resources: dict[bytes, Resource] = {}
        self.provider = TracerProvider(resource=Resource(GATEWAY_RESOURCE), shutdown_on_exit=False)
        """For spans of the ops application itself; they leave through the same queue."""
        self.provider.add_span_processor(self._processor)

    def export(self, spans: Iterable[Span]) -> None:
        """Queues spans to be sent."""
        for span in spans:
            self._processor.on_end(readable(span, self._shared_resource(span.resource)))

    def count_failures(self, failed: Callable[[int], None]) -> None:
        """`failed` is told, on the sender's thread, of traces that the backend did not take."""
        self._sender.failed = failed

    def close(self) -> None:
        """Sends what is queued, for at most CLOSE_SECONDS: a backend that is away does not keep the process."""
        closing = threading.Thread(target=self.provider.shutdown, name="close-export", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)
        if closing.is_alive():
            log.warning("spans that the backend did not take within %d s are lost", CLOSE_SECONDS)

    def _shared_resource(self, attributes: Attributes) -> Resource:
        """One Resource object per distinct resource, so that the SDK groups by it cheaply."""
        key = msgspec.msgpack.encode(attributes)
        found = self._resources.get(key)
        if found is None:
            if len(self._resources) >= MAX_RESOURCES:
                self._resources.clear()
            found = self._resources[key] = Resource(attributes)
        return found


def exporter_from_environment(settings: Settings, environment: Mapping[str, str] = os.environ) -> Exporter | None:
    """The exporter that the environment asks for, or None. Raises ExportError."""
    endpoint = endpoint_of(environment)
    if endpoint is None:
        return None
    variable = TRACES_ENDPOINT if environment.get(TRACES_ENDPOINT) else ENDPOINT
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ExportError(f"{variable}={environment[variable]} is not an http(s) URL, like http://collector:4318")
    if is_own_receiver(parts.hostname, parts.port or (443 if parts.scheme == "https" else 80), settings):
        raise ExportError(
            f"{variable}={environment[variable]} is this gateway's own OTLP receiver "
            f"(server.otlp_port {settings.server.otlp_port}): spans would go round in circles. "
            "Name the backend's address there, or move the receiver with server.otlp_port"
        )
    protocol = environment.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environment.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    if protocol not in (None, "", "http/protobuf"):
        raise ExportError(f"the OTLP protocol {protocol!r} is not spoken here; use http/protobuf (port 4318, not 4317)")
    log.info("kept traces are exported to %s", endpoint)
    return Exporter(endpoint)


def endpoint_of(environment: Mapping[str, str]) -> str | None:
    """The URL that spans are posted to, after OpenTelemetry's rules; None when export is off."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    if whole := environment.get(TRACES_ENDPOINT):
        return whole
    if base := environment.get(ENDPOINT):
        return base.rstrip("/") + "/v1/traces"
    return None


def is_own_receiver(host: str, port: int, settings: Settings) -> bool:
    """Whether host and port lead to our own OTLP listener."""
    if port != settings.server.otlp_port:
        return False
    own = _addresses(settings.server.otlp_host)
    theirs = _addresses(host)
    if own & theirs:
        return True
    if any(ipaddress.ip_address(address).is_unspecified for address in own):
        local = _addresses("localhost") | _addresses(socket.gethostname())
        return bool(theirs & local) or any(ipaddress.ip_address(address).is_loopback for address in theirs)
    return False


def _addresses(host: str) -> set[str]:
    try:
        return {str(info[4][0]).partition("%")[0] for info in socket.getaddrinfo(host, None)}
    except OSError:
        return set()


def readable(span: Span, resource: Resource) -> ReadableSpan:
    """The SDK's shape of a span."""
    trace_id = int(span.trace_id, 16)
    state = TraceState.from_header([span.trace_state]) if span.trace_state else TraceState()

    def context(span_id: str, *, remote: bool) -> SpanContext:
        return SpanContext(trace_id, int(span_id, 16), remote, TraceFlags(TraceFlags.SAMPLED), state)

    return ReadableSpan(
        name=span.name,
        context=context(span.span_id, remote=False),
        parent=context(span.parent_id, remote=span.kind is SpanKind.SERVER) if span.parent_id else None,
        resource=resource,
        attributes=span.attributes,
        events=[Event(event.name, event.attributes, event.time_ns) for event in span.events],
        links=[
            Link(
                SpanContext(int(link.trace_id, 16), int(link.span_id, 16), True, TraceFlags(TraceFlags.SAMPLED)),
                link.attributes,
            )
            for link in span.links
        ],
        kind=_KINDS[span.kind],
        status=Status(_STATUSES[span.status], span.status_message or None)
        if span.status is SpanStatus.ERROR
        else Status(_STATUSES[span.status]),
        start_time=span.start_ns,
        end_time=span.end_ns,
        instrumentation_scope=InstrumentationScope(span.scope, span.scope_version) if span.scope else None,
    )
