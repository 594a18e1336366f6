"""OTLP bodies to spans: protobuf and JSON in, neutral `Span`s out, and what had to be refused.

Every limit here protects the observer from a sender; whatever is within them is kept as it came.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import msgspec
from google.protobuf import json_format
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans
from opentelemetry.proto.trace.v1.trace_pb2 import Span as ProtoSpan

from tracing.spans import Attributes, AttributeValue, Span, SpanEvent, SpanKind, SpanLink, SpanStatus

MAX_ATTRIBUTES = 128
MAX_EVENTS = 512
MAX_LINKS = 32
MAX_TEXT = 8192
MAX_DEPTH = 8

_KINDS = {
    1: SpanKind.INTERNAL,
    2: SpanKind.SERVER,
    3: SpanKind.CLIENT,
    4: SpanKind.PRODUCER,
    5: SpanKind.CONSUMER,
}
_STATUSES = {1: SpanStatus.OK, 2: SpanStatus.ERROR}
_ID_FIELDS = ("traceId", "spanId", "parentSpanId")


class Received(msgspec.Struct, frozen=True):
    """One body's spans, how many were refused, and why the first of those was."""

    spans: list[Span]
    rejected: int
    reason: str


class MalformedError(ValueError):
    """The body is not an ExportTraceServiceRequest."""


def from_protobuf(body: bytes) -> Received:
    """Spans of a protobuf body. Raises MalformedError."""
    try:
        return _received(ExportTraceServiceRequest.FromString(body))
    except DecodeError as error:
        raise MalformedError(f"the body is not a protobuf ExportTraceServiceRequest: {error}") from error


def from_json(body: bytes) -> Received:
    """Spans of an OTLP/JSON body, whose ids are hex (protobuf's own JSON has base64). Raises MalformedError."""
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"the body is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise MalformedError(f"the body is a JSON {type(parsed).__name__}, not an ExportTraceServiceRequest object")
    for span in _json_spans(parsed):
        _ids_to_base64(span)
        for link in _objects(span.get("links")):
            _ids_to_base64(link)
    try:
        request = json_format.ParseDict(parsed, ExportTraceServiceRequest(), ignore_unknown_fields=True)
    except (json_format.ParseError, RecursionError) as error:
        raise MalformedError(f"the body is not an ExportTraceServiceRequest: {error}") from error
    return _received(request)


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    return (item for item in value if isinstance(item, dict)) if isinstance(value, list) else iter(())


def _json_spans(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for resource_spans in _objects(request.get("resourceSpans")):
        for scope_spans in _objects(resource_spans.get("scopeSpans")):
            yield from _objects(scope_spans.get("spans"))


def _ids_to_base64(holder: dict[str, Any]) -> None:
    """Hex ids become base64; what is not hex becomes empty, which the length check refuses."""
    for field in _ID_FIELDS:
        value = holder.get(field)
        if value is None:
            continue
        try:
            raw = bytes.fromhex(value)
        except (TypeError, ValueError):
            raw = b""
        holder[field] = base64.b64encode(raw).decode()


def _received(request: ExportTraceServiceRequest) -> Received:
    spans: list[Span] = []
    rejected, reason = 0, ""
    for resource_spans in request.resource_spans:
        for item in _spans_of(resource_spans):
            if isinstance(item, Span):
                spans.append(item)
            else:
                rejected += 1
                reason = reason or item
    return Received(spans, rejected, reason)


def _spans_of(resource_spans: ResourceSpans) -> Iterator[Span | str]:
    """Each span, or the reason why it is refused."""
    resource = _attributes(resource_spans.resource.attributes)
    for scope_spans in resource_spans.scope_spans:
        scope = scope_spans.scope
        for span in scope_spans.spans:
            yield _fault(span) or _span(span, resource, scope.name[:MAX_TEXT], scope.version[:MAX_TEXT])


def _fault(span: ProtoSpan) -> str | None:
    name = span.name[:64]
    if len(span.trace_id) != 16 or not any(span.trace_id):
        return f"span {name!r}: the trace id must be 16 bytes (32 hex digits in JSON), not all zero"
    if len(span.span_id) != 8 or not any(span.span_id):
        return f"span {name!r}: the span id must be 8 bytes (16 hex digits in JSON), not all zero"
    if len(span.parent_span_id) not in (0, 8):
        return f"span {name!r}: the parent span id must be 8 bytes (16 hex digits in JSON) or absent"
    if not span.start_time_unix_nano or span.end_time_unix_nano < span.start_time_unix_nano:
        return f"span {name!r}: start and end time must be set, and the end must not lie before the start"
    if span.end_time_unix_nano >= 2**63:
        return f"span {name!r}: the end time is beyond the year 2262"
    return None


def _span(span: ProtoSpan, resource: Attributes, scope: str, scope_version: str) -> Span:
    return Span(
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex() if any(span.parent_span_id) else None,
        name=span.name[:MAX_TEXT],
        kind=_KINDS.get(span.kind, SpanKind.INTERNAL),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=_attributes(span.attributes),
        events=[
            SpanEvent(event.name[:MAX_TEXT], min(event.time_unix_nano, 2**63 - 1), _attributes(event.attributes))
            for event in span.events[:MAX_EVENTS]
        ],
        links=[
            SpanLink(link.trace_id.hex(), link.span_id.hex(), _attributes(link.attributes))
            for link in span.links[:MAX_LINKS]
            if len(link.trace_id) == 16 and len(link.span_id) == 8
        ],
        status=_STATUSES.get(span.status.code, SpanStatus.UNSET),
        status_message=span.status.message[:MAX_TEXT],
        resource=resource,
        scope=scope,
        scope_version=scope_version,
        trace_state=span.trace_state[:512],
    )


def _attributes(pairs: Any) -> Attributes:
    found: Attributes = {}
    pair: KeyValue
    for pair in pairs[:MAX_ATTRIBUTES]:
        value = _value(pair.value, 0)
        if value is not None:
            found[pair.key[:MAX_TEXT]] = value
    return found


def _value(value: AnyValue, depth: int) -> AttributeValue | None:
    kind = value.WhichOneof("value")
    if kind == "string_value":
        return value.string_value[:MAX_TEXT]
    if kind in ("int_value", "double_value", "bool_value"):
        plain: AttributeValue = getattr(value, kind)
        return plain
    if kind == "bytes_value":
        return value.bytes_value[: MAX_TEXT // 2].hex()
    if depth >= MAX_DEPTH:
        return None
    if kind == "array_value":
        items = (_value(item, depth + 1) for item in value.array_value.values[:MAX_ATTRIBUTES])
        return [item for item in items if item is not None]
    if kind == "kvlist_value":
        pairs = ((pair.key, _value(pair.value, depth + 1)) for pair in value.kvlist_value.values[:MAX_ATTRIBUTES])
        return {key: item for key, item in pairs if item is not None}
    return None
