"""One attempt at one upstream: which headers go there and come back, and what its failures mean."""

from __future__ import annotations

import aiohttp

from gateway.exchange import Exchange
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
NOT_RETURNED = frozenset(
    {
        "connection", "keep-alive", "proxy-authenticate", "proxy-connection", "te", "trailer", "transfer-encoding",
        "upgrade", "content-length", "content-encoding", "date", "server", "set-cookie", "x-request-id", "request-id",
        "traceparent", "tracestate", "server-timing", "alt-svc", "strict-transport-security",
    }
)  # fmt: skip


def request_headers(exchange: Exchange, attempt: Attempt, target: Target) -> dict[str, str]:
    """What the upstream gets: the client's headers less ours, the upstream's key, this attempt's span as parent."""
    ledger = exchange.ledger
    named = _named(exchange.headers.get(b"connection", b"").decode("latin-1"))
    headers = {
        name.decode("latin-1"): value.decode("latin-1")
        for name, value in exchange.headers.items()
        if name not in NOT_FORWARDED and not name.startswith(b"x-tokenline-") and name.decode("latin-1") not in named
    }
    headers["content-type"] = "application/json"
    headers["accept-encoding"] = "identity"
    # engines name requests by the first; the second is never anybody's but a gateway's, so ours puts it on its spans
    headers["x-request-id"] = headers["x-tokenline-request-id"] = ledger.request_id
    headers["traceparent"] = format_traceparent(ledger.trace_id, attempt.span_id)
    if ledger.tracestate:
        headers["tracestate"] = ledger.tracestate
    headers |= credentials(target.upstream)
    return headers


def credentials(upstream: Upstream) -> dict[str, str]:
    """The upstream's key in the header that it reads; empty without one."""
    if not upstream.api_key:
        return {}
    name = upstream.api_key_header
    return {name: f"Bearer {upstream.api_key}" if name == "authorization" else upstream.api_key}


def answer_headers(response: aiohttp.ClientResponse, upstream: str) -> list[tuple[bytes, bytes]]:
    """What the client gets of the upstream's headers, and which upstream it was."""
    named = _named(response.headers.get("connection", ""))
    kept = [
        (name.lower().encode("latin-1"), value.encode("latin-1", "replace"))
        for name, value in response.headers.items()
        if name.lower() not in NOT_RETURNED
        and not name.lower().startswith(("x-tokenline-", "access-control-"))
        and name.lower() not in named
    ]
    return [*kept, (b"x-tokenline-upstream", upstream.encode())]


def _named(connection: str) -> frozenset[str]:
    """Headers that a Connection header declares to be for this hop only (RFC 9110, 7.6.1)."""
    return frozenset(token.strip().lower() for token in connection.split(",")) if connection else frozenset()


def retry_after(response: aiohttp.ClientResponse) -> float | None:
    """The upstream's own wish, in whole seconds up to a day; its other form, a date, is not read."""
    value = response.headers.get("retry-after", "")
    return float(value) if value.isascii() and value.isdigit() and len(value) <= 5 else None


def connection_error(error: aiohttp.ClientError | OSError, upstream: str) -> tuple[str, ApiError]:
    """(short name for the attempt, what the client is told). Addresses and paths stay inside."""
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ClientConnectorDNSError):
        return "connect", ApiError(
            503,
            "upstream_unavailable",
            f"The upstream {upstream!r} can't be reached (stage: connect). It may be starting; try again shortly.",
            retry_after=2,
        )
    if isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError):
        return "first_byte", ApiError(
            502,
            "upstream_error",
            f"The upstream {upstream!r} closed the connection before it answered (stage: first byte).",
        )
    return "protocol", ApiError(
        502, "upstream_error", f"The upstream {upstream!r} broke the HTTP protocol (stage: first byte)."
    )
