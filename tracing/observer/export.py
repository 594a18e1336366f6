"""Export: kept traces go on to an OTLP backend, with the ids, parents and resources that they came with.

On when OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_EXPORTER_OTLP_ENDPOINT is set; headers, timeout, compression and
certificates come from OpenTelemetry's own variables. The SDK's batch processor owns the queue and the thread that
sends, and tries again for as long as a batch may take. What does not fit into the queue is left out here, whole traces
at a time, and counted: the SDK would drop single spans and say so nowhere.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from urllib.parse import urlsplit

import msgspec
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, SpanProcessor, TracerProvider
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
MAX_BATCH_SPANS = 512
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


Dropped = Callable[[str, int], None]
"""(reason, how many traces were lost, in whole or in part); called on any thread."""


class _Queue:
    """How many spans wait to be sent, and what was lost."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self.waiting = 0
        self.dropped: Dropped = lambda reason, traces: None

    def take(self, spans: int) -> bool:
        """Room for so many spans, or False and a trace counted as lost."""
        with self._lock:
            if self.waiting + spans <= self._size:
                self.waiting += spans
                return True
        self.dropped("export_queue_full", 1)
        return False

    def give_back(self, spans: int) -> None:
        """So many left the queue, sent or not."""
        with self._lock:
            self.waiting -= spans


class _CountingExporter(OTLPSpanExporter):
    """Tells how many traces a batch held that could not be sent, after the SDK's own retries."""

    def __init__(self, endpoint: str, queue: _Queue) -> None:
        super().__init__(endpoint=endpoint)
        self._queue = queue

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._queue.give_back(len(spans))
        result = super().export(spans)
        if result is not SpanExportResult.SUCCESS:
            self._queue.dropped("export_failed", len({span.context.trace_id for span in spans if span.context}))
        return result


class _BoundedProcessor(SpanProcessor):
    """For spans that the SDK itself ends: they take their place in the queue like the others."""

    def __init__(self, processor: BatchSpanProcessor, queue: _Queue) -> None:
        self._processor = processor
        self._queue = queue

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is not None and span.context.trace_flags.sampled and self._queue.take(1):
            self._processor.on_end(span)

    def shutdown(self) -> None:
        self._processor.shutdown()  # type: ignore[no-untyped-call]


class Exporter:
    """Hands spans to the SDK. `export` may be called from any thread and never waits."""

    def __init__(self, endpoint: str, *, max_queue_spans: int = MAX_QUEUE_SPANS) -> None:
        self._queue = _Queue(max_queue_spans)
        self._processor = BatchSpanProcessor(
            _CountingExporter(endpoint, self._queue),
            max_queue_size=max_queue_spans,
            max_export_batch_size=min(MAX_BATCH_SPANS, max_queue_spans),
            schedule_delay_millis=SCHEDULE_DELAY_MS,
        )
        self._resources: dict[bytes, Resource] = {}
        self.provider = TracerProvider(resource=Resource(GATEWAY_RESOURCE), shutdown_on_exit=False)
        """For spans of the ops application itself; they leave through the same queue."""
        self.provider.add_span_processor(_BoundedProcessor(self._processor, self._queue))

    def export(self, spans: Sequence[Span]) -> None:
        """Queues spans of one trace to be sent: all of them, or none when they do not fit."""
        if spans and self._queue.take(len(spans)):
            for span in spans:
                self._processor.on_end(readable(span, self._shared_resource(span.resource)))

    def count_dropped(self, dropped: Dropped) -> None:
        """`dropped` is told of traces that did not fit into the queue or that the backend did not take."""
        self._queue.dropped = dropped

    def close(self) -> None:
        """Sends what is queued, for at most CLOSE_SECONDS: a backend that is away does not keep the process."""
        closing = threading.Thread(target=self.provider.shutdown, name="close-export", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)
        if closing.is_alive():
            log.warning(
                "spans that the backend did not take within %d s are lost; %d were still queued",
                CLOSE_SECONDS,
                self._queue.waiting,
            )

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
