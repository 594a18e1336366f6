"""One attempt at one upstream: which headers go there and come back, and what its failures mean."""

from __future__ import annotations

from gateway.exchange import Exchange, Headers
from gateway.upstreams.http1 import ConnectFailed, ConnectionLost, UpstreamFault
from gateway.upstreams.pool import UpstreamAnswer
from gateway.upstreams.router import Target, Upstream
from protocol.errors import ApiError
from protocol.ids import format_traceparent
from tracing.ledger import Attempt

NOT_FORWARDED = frozenset(
    {
        # Hop-by-hop (RFC 9110, 7.6.1) and what this hop sets itself.
        b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te",
        b"trailer", b"transfer-encoding", b"upgrade", b"host", b"content-length", b"content-type", b"expect",
        b"accept-encoding", b"content-encoding",
        # Credentials are the gateway's business, on either side.
        b"authorization", b"x-api-key", b"api-key", b"cookie",
        # Identity and trace are the attempt's own.
        b"x-request-id", b"traceparent", b"tracestate",
    }
)  # fmt: skip
_ALWAYS: Headers = [(b"content-type", b"application/json"), (b"accept-encoding", b"identity")]
NOT_RETURNED = frozenset(
    {
        b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-connection", b"te", b"trailer",
        b"transfer-encoding", b"upgrade", b"content-length", b"content-encoding", b"date", b"server", b"set-cookie",
        b"x-request-id", b"request-id", b"traceparent", b"tracestate", b"server-timing", b"alt-svc",
        b"strict-transport-security",
    }
)  # fmt: skip


def request_headers(exchange: Exchange, attempt: Attempt, target: Target) -> bytes:
    """What the upstream gets, as lines: the client's headers less ours, its key, this attempt's span as parent."""
    ledger = exchange.ledger
    named = _named(exchange.headers.get(b"connection", b""))
    headers = [
        header
        for header in exchange.headers.items()
        if header[0] not in NOT_FORWARDED and not header[0].startswith(b"x-tokenline-") and header[0] not in named
    ]
    headers += _ALWAYS
    request_id = ledger.request_id.encode()
    # Engines name requests by the first; the second is never anybody's but a gateway's, so ours puts it on its spans.
    headers += ((b"x-request-id", request_id), (b"x-tokenline-request-id", request_id))
    headers.append((b"traceparent", format_traceparent(ledger.trace_id, attempt.span_id).encode()))
    if ledger.tracestate:
        headers.append((b"tracestate", ledger.tracestate.encode("latin-1")))
    headers += credentials(target.upstream)
    return header_lines(headers)


def credentials(upstream: Upstream) -> Headers:
    """The upstream's key in the header that it reads; empty without one."""
    if not upstream.api_key:
        return []
    name = upstream.api_key_header
    value = f"Bearer {upstream.api_key}" if name == "authorization" else upstream.api_key
    return [(name.encode(), value.encode())]


def header_lines(headers: Headers) -> bytes:
    """Headers as HTTP/1.1 writes them."""
    return b"".join([b"%b: %b\r\n" % header for header in headers])


def answer_headers(answer: UpstreamAnswer, upstream: str) -> Headers:
    """What the client gets of the upstream's headers, and which upstream it was."""
    named = _named(answer.header(b"connection").encode("latin-1"))
    kept = [
        header
        for header in answer.headers
        if header[0] not in NOT_RETURNED
        and not header[0].startswith((b"x-tokenline-", b"access-control-"))
        and header[0] not in named
    ]
    return [*kept, (b"x-tokenline-upstream", upstream.encode())]


def _named(connection: bytes) -> frozenset[bytes]:
    """Headers that a Connection header declares to be for this hop only (RFC 9110, 7.6.1)."""
    return frozenset(token.strip().lower() for token in connection.split(b",")) if connection else frozenset()


def retry_after(answer: UpstreamAnswer) -> float | None:
    """The upstream's own wish, in whole seconds up to a day; its other form, a date, is not read."""
    value = answer.header(b"retry-after")
    return float(value) if value.isascii() and value.isdigit() and len(value) <= 5 else None


def connection_error(error: UpstreamFault, upstream: str) -> tuple[str, ApiError]:
    """(short name for the attempt, what the client is told). Addresses and paths stay inside."""
    if isinstance(error, ConnectFailed):
        return "connect", ApiError(
            503,
            "upstream_unavailable",
            f"The upstream {upstream!r} can't be reached (stage: connect). It may be starting; try again shortly.",
            retry_after=2,
        )
    if isinstance(error, ConnectionLost):
        return "first_byte", ApiError(
            502,
            "upstream_error",
            f"The upstream {upstream!r} closed the connection before it answered (stage: first byte).",
        )
    return "protocol", ApiError(
        502, "upstream_error", f"The upstream {upstream!r} broke the HTTP protocol (stage: first byte)."
    )
