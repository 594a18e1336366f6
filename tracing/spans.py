"""Spans: one neutral shape for every span, and the gateway's own spans made from a ledger.

The relay makes no spans: it stamps marks. Wall times here are `ledger.wall_ns` (read once, at ingress) plus monotonic
differences. Ids of spans that the relay did not name are hashes, so that making them twice makes the same spans.
"""

from __future__ import annotations

import enum
import hashlib
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec

from tracing import semconv
from tracing.ledger import Attempt, Ledger, Outcome
from tracing.stages import Timeline

AttributeValue = str | bool | int | float | list[Any] | dict[str, Any]
Attributes = dict[str, AttributeValue]

ROUTES = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "embeddings": "/v1/embeddings",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "count_tokens": "/v1/messages/count_tokens",
    "tokenize": "/tokenize",
    "detokenize": "/detokenize",
    "models": "/v1/models",
}
"""Surface -> http.route: every prefix that a client may use is one route."""
OPERATIONS = {
    "chat": "chat",
    "responses": "chat",
    "messages": "chat",
    "completions": "text_completion",
    "embeddings": "embeddings",
}


def _version() -> str:
    try:
        return version("tokenline")
    except PackageNotFoundError:
        return "unknown"


GATEWAY_RESOURCE: Attributes = {"service.name": "tokenline-gateway", "service.version": _version()}
GATEWAY_SCOPE = "tokenline.gateway"


class SpanKind(enum.StrEnum):
    """OpenTelemetry's span kinds."""

    INTERNAL = "internal"
    SERVER = "server"
    CLIENT = "client"
    PRODUCER = "producer"
    CONSUMER = "consumer"


class SpanStatus(enum.StrEnum):
    """OpenTelemetry's span status codes."""

    UNSET = "unset"
    OK = "ok"
    ERROR = "error"


class SpanEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """Something that happened at one instant (wall ns) of a span."""

    name: str
    time_ns: int
    attributes: Attributes = {}


class SpanLink(msgspec.Struct, frozen=True, omit_defaults=True):
    """A reference to a span of this or another trace."""

    trace_id: str
    span_id: str
    attributes: Attributes = {}


class Span(msgspec.Struct, frozen=True, omit_defaults=True):
    """A span, whoever made it. Ids are lower-case hex (32 and 16 digits), times wall ns since 1970."""

    trace_id: str
    span_id: str
    name: str
    start_ns: int
    end_ns: int
    parent_id: str | None = None
    kind: SpanKind = SpanKind.INTERNAL
    attributes: Attributes = {}
    events: list[SpanEvent] = []
    links: list[SpanLink] = []
    status: SpanStatus = SpanStatus.UNSET
    status_message: str = ""
    resource: Attributes = {}
    scope: str = ""
    scope_version: str = ""
    trace_state: str = ""


def weight_of(span: Span) -> int:
    """About how many bytes of memory the span takes; its resource is shared and not counted."""
    events = sum(200 + _weight(event.attributes) for event in span.events)
    return 700 + _weight(span.attributes) + events + sum(300 + _weight(link.attributes) for link in span.links)


def _weight(value: AttributeValue | Attributes) -> int:
    if isinstance(value, str):
        return 50 + len(value)
    if isinstance(value, dict):
        return 64 + sum(100 + _weight(item) for item in value.values())
    if isinstance(value, list):
        return 64 + sum(8 + _weight(item) for item in value)
    return 32


def derived_span_id(*parts: str) -> str:
    """16 hex digits that depend on `parts` alone, never all zero."""
    digest = hashlib.blake2b("\0".join(parts).encode(), digest_size=8).hexdigest()
    return digest if int(digest, 16) else "0000000000000001"


def known(attributes: dict[str, AttributeValue | None]) -> Attributes:
    """The attributes whose value is known."""
    return {name: value for name, value in attributes.items() if value is not None}


class Calendar:
    """Places monotonic marks of one ledger on the wall clock."""

    def __init__(self, ledger: Ledger) -> None:
        self._offset_ns = ledger.wall_ns - ledger.ingress

    def wall(self, mono_ns: int) -> int:
        """Wall ns of a mark of the gateway's clock."""
        return self._offset_ns + mono_ns

    def event(self, name: str, mono_ns: int) -> list[SpanEvent]:
        """One event at a mark, or none where the request never got there."""
        return [SpanEvent(name, self.wall(mono_ns))] if mono_ns else []


def route_of(ledger: Ledger) -> str | None:
    """http.route of the request; None for a path that is no surface's."""
    return ROUTES.get(ledger.surface)


def gateway_spans(ledger: Ledger, timeline: Timeline) -> list[Span]:
    """The gateway's own spans of one request, parents before children."""
    calendar = Calendar(ledger)
    end = _end(ledger)
    spans = [_server_span(ledger, timeline, calendar, end)]
    for name, start, stop in (
        ("auth", ledger.ingress, ledger.authenticated),
        ("receive", ledger.authenticated, ledger.body_read),
        ("route", ledger.body_read, ledger.routed),
        ("queue", ledger.routed, ledger.admitted),
    ):
        if start and stop:
            spans.append(_internal_span(ledger, calendar, name, start, stop))
    spans += [_attempt_span(ledger, attempt, calendar, end) for attempt in ledger.attempts]
    if ledger.attempts and (answered := ledger.attempts[-1].upstream_first_byte):
        written = calendar.event("first_token_written", ledger.first_token_written)
        spans.append(_internal_span(ledger, calendar, "relay", answered, end, written))
    return spans


def _end(ledger: Ledger) -> int:
    """The last mark of the request: `finish`, unless its writer died before."""
    return ledger.finish or max(ledger.ingress, ledger.upstream_end, ledger.first_token_written, ledger.admitted)


def error_type(ledger: Ledger) -> str | None:
    """`error.type` of a request that did not end well."""
    return None if ledger.outcome is Outcome.OK else (ledger.error_code or ledger.outcome.value)


def _server_span(ledger: Ledger, timeline: Timeline, calendar: Calendar, end: int) -> Span:
    route = route_of(ledger)
    operation = OPERATIONS.get(ledger.surface)
    usage = ledger.usage
    attributes = known(
        {
            semconv.HTTP_METHOD: ledger.method or None,
            semconv.HTTP_ROUTE: route,
            semconv.URL_PATH: ledger.path or None,
            semconv.URL_SCHEME: "http",
            semconv.HTTP_STATUS: ledger.status or None,
            semconv.GEN_AI_OPERATION: operation,
            semconv.GEN_AI_PROVIDER: "tokenline" if operation else None,
            semconv.GEN_AI_REQUEST_MODEL: ledger.model if operation else None,
            semconv.GEN_AI_INPUT_TOKENS: usage.input_tokens,
            semconv.GEN_AI_OUTPUT_TOKENS: usage.output_tokens,
            semconv.CACHED_TOKENS: usage.cached_tokens,
            semconv.GEN_AI_FINISH_REASONS: [ledger.finish_reason] if ledger.finish_reason else None,
            semconv.REQUEST_ID: ledger.request_id,
            semconv.CLIENT_REQUEST_ID: ledger.client_request_id,
            semconv.SURFACE: ledger.surface,
            semconv.UPSTREAM: ledger.upstream,
            semconv.OUTCOME: ledger.outcome.value,
            semconv.KEY_ALIAS: ledger.key_alias,
            semconv.TEAM: ledger.team,
            semconv.TTFT: timeline.ttft,
            semconv.TPOT: timeline.tpot,
            semconv.UNACCOUNTED: timeline.unaccounted,
            semconv.ERROR_TYPE: error_type(ledger),
        }
    )
    failed = ledger.status >= 500 or ledger.outcome in (
        Outcome.UPSTREAM_ERROR,
        Outcome.UPSTREAM_TIMEOUT,
        Outcome.GATEWAY_ERROR,
    )
    method = ledger.method or "HTTP"
    return Span(
        trace_id=ledger.trace_id,
        span_id=ledger.span_id,
        parent_id=ledger.parent_span_id,
        name=f"{method} {route}" if route else method,
        kind=SpanKind.SERVER,
        start_ns=ledger.wall_ns,
        end_ns=calendar.wall(end),
        attributes=attributes,
        events=[
            *calendar.event("first_token_written", ledger.first_token_written),
            *calendar.event("client_gone", ledger.client_gone),
        ],
        status=SpanStatus.ERROR if failed else SpanStatus.UNSET,
        status_message=(error_type(ledger) or "") if failed else "",
        resource=GATEWAY_RESOURCE,
        scope=GATEWAY_SCOPE,
        trace_state=ledger.tracestate or "",
    )


def _internal_span(
    ledger: Ledger, calendar: Calendar, name: str, start: int, end: int, events: list[SpanEvent] | None = None
) -> Span:
    return Span(
        trace_id=ledger.trace_id,
        span_id=derived_span_id(ledger.trace_id, ledger.span_id, name),
        parent_id=ledger.span_id,
        name=name,
        start_ns=calendar.wall(start),
        end_ns=calendar.wall(end),
        events=events or [],
        resource=GATEWAY_RESOURCE,
        scope=GATEWAY_SCOPE,
        trace_state=ledger.tracestate or "",
    )


def _attempt_span(ledger: Ledger, attempt: Attempt, calendar: Calendar, end: int) -> Span:
    is_last = attempt is ledger.attempts[-1]
    operation = OPERATIONS.get(ledger.surface, ledger.surface)
    failed = (attempt.error is not None and attempt.error != "cancelled") or attempt.status >= 400
    attributes = known(
        {
            semconv.GEN_AI_OPERATION: operation,
            semconv.GEN_AI_PROVIDER: attempt.upstream,
            semconv.GEN_AI_REQUEST_MODEL: attempt.model,
            semconv.GEN_AI_RESPONSE_ID: attempt.upstream_request_id,
            semconv.GEN_AI_INPUT_TOKENS: ledger.usage.input_tokens if is_last else None,
            semconv.GEN_AI_OUTPUT_TOKENS: ledger.usage.output_tokens if is_last else None,
            semconv.HTTP_METHOD: ledger.method or None,
            semconv.HTTP_STATUS: attempt.status or None,
            semconv.ATTEMPT: attempt.number,
            semconv.UPSTREAM: attempt.upstream,
            semconv.CONNECTION_REUSED: attempt.reused,
            semconv.ERROR_TYPE: attempt.error or (str(attempt.status) if attempt.status >= 400 else None),
        }
    )
    started = attempt.connect_start or ledger.admitted or ledger.ingress
    return Span(
        trace_id=ledger.trace_id,
        span_id=attempt.span_id,
        parent_id=ledger.span_id,
        name=f"{operation} {attempt.model}",
        kind=SpanKind.CLIENT,
        start_ns=calendar.wall(started),
        end_ns=calendar.wall(max(started, attempt.end or (end if is_last else started))),
        attributes=attributes,
        events=[
            *calendar.event("connected", attempt.connected),
            *calendar.event("request_sent", attempt.request_sent),
            *calendar.event("upstream_headers", attempt.upstream_headers),
            *calendar.event("upstream_first_byte", attempt.upstream_first_byte),
            *(calendar.event("first_token", ledger.first_token) if is_last else []),
        ],
        status=SpanStatus.ERROR if failed else SpanStatus.UNSET,
        status_message=(attempt.error or "") if failed else "",
        resource=GATEWAY_RESOURCE,
        scope=GATEWAY_SCOPE,
        trace_state=ledger.tracestate or "",
    )
