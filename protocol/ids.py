"""Identifiers: request ids and W3C trace context (https://www.w3.org/TR/trace-context/)."""

from __future__ import annotations

import random
import re
import secrets

LOAD_TEST_PREFIX = "tokenline-bench-"
"""Client's request ids of our own load tests begin so; then comes the run, and the request's number in it."""

_source = random.Random(secrets.randbits(256))  # noqa: S311  ids must be unique, not secret
_CLIENT_ID = re.compile(r"[A-Za-z0-9._-]{1,128}\Z")
_OUR_REQUEST_ID = re.compile(r"req_[0-9a-f]{24}\Z")
_OURS = re.compile(r"(req_[0-9a-f]{24}|[0-9a-f]{32})\Z", re.IGNORECASE)
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?\Z")


def new_trace_id() -> str:
    """32 hex digits, never all zero."""
    return f"{_source.getrandbits(128) or 1:032x}"


def new_span_id() -> str:
    """16 hex digits, never all zero."""
    return f"{_source.getrandbits(64) or 1:016x}"


def new_request_id() -> str:
    """Our own id of a request: `req_` and 24 hex digits, unique."""
    return f"req_{_source.getrandbits(96):024x}"


def accepted_gateway_id(value: str) -> str | None:
    """A request id that a gateway of ours made, else None."""
    return value if _OUR_REQUEST_ID.match(value) else None


def accepted_client_id(value: str) -> str | None:
    """The client's own request id if it is harmless, else None.

    Harmless: 1 to 128 of A-Za-z0-9._-, and not of the form of our own request ids or of trace ids, so that nobody can
    name a request after somebody else's.
    """
    return value if _CLIENT_ID.match(value) and not _OURS.match(value) else None


def parse_traceparent(value: str) -> tuple[str, str, int] | None:
    """(trace id, parent span id, flags) of a valid traceparent, else None.

    Version ff is invalid; a version above 00 may carry more fields, which are ignored (W3C, section 2.2).
    """
    found = _TRACEPARENT.match(value)
    if not found:
        return None
    version, trace_id, span_id, flags, rest = found.groups()
    if version == "ff" or (version == "00" and rest) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    return trace_id, span_id, int(flags, 16)


def format_traceparent(trace_id: str, span_id: str, *, sampled: bool = True) -> str:
    """A version 00 traceparent."""
    return f"00-{trace_id}-{span_id}-{'01' if sampled else '00'}"
