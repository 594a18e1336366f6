"""OTLP bodies to spans: protobuf and JSON in, neutral `Span`s out, and what had to be refused.

Every limit here protects the observer from a sender; whatever is within them is kept as it came.
"""

from __future__ import annotations

import base64
import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec
from google.protobuf import json_format
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as ProtoSpan

from tracing.spans import Attributes, AttributeValue, Span, SpanEvent, SpanKind, SpanLink, SpanStatus

MAX_ATTRIBUTES = 128
MAX_EVENTS = 512
MAX_LINKS = 32
MAX_TEXT = 8192
MAX_DEPTH = 8
MAX_SPANS = 20_000
"""Of one body; the rest are rejected, and the sender is told to send smaller batches."""
FUTURE_NS = 300 * 10**9
"""A span that begins this much after our own wall clock is counted; it is kept, for the sender's clock may be wrong."""

ZERO, NEGATIVE, BEYOND, FUTURE = "span_zero_time", "span_negative", "span_beyond_2262", "span_future"
"""Kinds of `tokenline_timing_anomalies_total`; the first three are refused."""

_KINDS = {
    1: SpanKind.INTERNAL,
    2: SpanKind.SERVER,
    3: SpanKind.CLIENT,
    4: SpanKind.PRODUCER,
    5: SpanKind.CONSUMER,
}
_STATUSES = {1: SpanStatus.OK, 2: SpanStatus.ERROR}
_HEX = re.compile(r"(?:[0-9a-fA-F]{2})*")
_ID_FIELDS = ("traceId", "spanId", "parentSpanId")


class Received(msgspec.Struct, frozen=True):
    """One body's spans, how many were refused, and why the first of those was."""

    spans: list[Span]
    rejected: int
    reason: str
    anomalies: dict[str, int] = {}
    """Times that cannot be right, by kind: how many spans had them, refused or not."""


class MalformedError(ValueError):
    """The body is not an ExportTraceServiceRequest."""


def from_protobuf(body: bytes, now_ns: int | None = None) -> Received:
    """Spans of a protobuf body; `now_ns` (wall) is what their times are held against. Raises MalformedError."""
    try:
        return _received(ExportTraceServiceRequest.FromString(body), now_ns, [])
    except DecodeError as error:
        raise MalformedError(f"the body is not a protobuf ExportTraceServiceRequest: {error}") from error


def from_json(body: bytes, now_ns: int | None = None) -> Received:
    """Spans of an OTLP/JSON body, whose ids are hex (protobuf's own JSON has base64). Raises MalformedError.

    A span that cannot be read is refused alone.
    """
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
    faults: list[str] = []
    try:
        request = _parsed(parsed, ExportTraceServiceRequest())
    except _UNREADABLE:
        faults = _without_unreadable_spans(parsed)
        try:
            request = _parsed(parsed, ExportTraceServiceRequest())
        except _UNREADABLE as error:
            raise MalformedError(f"the body is not an ExportTraceServiceRequest: {error}") from error
    return _received(request, now_ns, faults)


_UNREADABLE = (json_format.Error, ValueError, TypeError, AttributeError, RecursionError)
"""What ParseDict raises of JSON that has another shape."""


_Message = TypeVar("_Message", ExportTraceServiceRequest, ProtoSpan)


def _parsed(fields: Any, message: _Message) -> _Message:
    json_format.ParseDict(fields, message, ignore_unknown_fields=True)
    return message


def _without_unreadable_spans(request: dict[str, Any]) -> list[str]:
    """Takes the spans that cannot be read out of the request; says what was wrong with each."""
    faults: list[str] = []
    for resource_spans in _objects(request.get("resourceSpans")):
        for scope_spans in _objects(resource_spans.get("scopeSpans")):
            readable = []
            spans = scope_spans.get("spans")
            for span in spans if isinstance(spans, list) else []:
                try:
                    _parsed(span, ProtoSpan())
                except _UNREADABLE as error:
                    faults.append(f"a span cannot be read: {error}"[:500])
                else:
                    readable.append(span)
            scope_spans["spans"] = readable
    return faults


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
        is_hex = isinstance(value, str) and _HEX.fullmatch(value) is not None
        raw = bytes.fromhex(value) if is_hex else b""
        holder[field] = base64.b64encode(raw).decode()


def _received(request: ExportTraceServiceRequest, now_ns: int | None, faults: list[str]) -> Received:
    spans: list[Span] = []
    anomalies: Counter[str] = Counter()
    for resource_spans in request.resource_spans:
        resource = _attributes(resource_spans.resource.attributes)
        for scope_spans in resource_spans.scope_spans:
            scope, version = scope_spans.scope.name[:MAX_TEXT], scope_spans.scope.version[:MAX_TEXT]
            for span in scope_spans.spans:
                kind = _anomaly(span, now_ns)
                if kind is not None:
                    anomalies[kind] += 1
                fault = _fault(span, kind)
                if fault is None and len(spans) >= MAX_SPANS:
                    fault = f"there are over {MAX_SPANS} spans in the body; send smaller batches"
                if fault is None:
                    spans.append(_span(span, resource, scope, version))
                else:
                    faults.append(fault)
    return Received(spans, len(faults), faults[0] if faults else "", dict(anomalies))


def _anomaly(span: ProtoSpan, now_ns: int | None) -> str | None:
    """Kind of a time that cannot be right."""
    start, end = span.start_time_unix_nano, span.end_time_unix_nano
    if not start or not end:
        return ZERO
    if end < start:
        return NEGATIVE
    if end >= 2**63:
        return BEYOND
    return FUTURE if now_ns is not None and start > now_ns + FUTURE_NS else None


def _fault(span: ProtoSpan, anomaly: str | None) -> str | None:
    """Why the span is refused."""
    name = span.name[:64]
    if len(span.trace_id) != 16 or not any(span.trace_id):
        return f"span {name!r}: the trace id must be 16 bytes (32 hex digits in JSON), not all zero"
    if len(span.span_id) != 8 or not any(span.span_id):
        return f"span {name!r}: the span id must be 8 bytes (16 hex digits in JSON), not all zero"
    if len(span.parent_span_id) not in (0, 8):
        return f"span {name!r}: the parent span id must be 8 bytes (16 hex digits in JSON) or absent"
    if anomaly in (ZERO, NEGATIVE):
        return f"span {name!r}: start and end time must be set, and the end must not lie before the start"
    if anomaly == BEYOND:
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
