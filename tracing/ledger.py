"""The ledger: what the relay writes down of one request, and the records that carry it to the observer.

Marks are monotonic ns of the gateway's host (`tracing.clock`), each stamped once and never moved; 0 means that the
request never got there. Retries have marks of their own (`Attempt`).
"""

from __future__ import annotations

import enum

import msgspec

from protocol.timings import HostIdentity, Timings


class Outcome(enum.StrEnum):
    """How a request ended, once."""

    OK = "ok"
    CLIENT_ERROR = "client_error"
    AUTH_ERROR = "auth_error"
    RATE_LIMITED = "rate_limited"
    QUEUE_REJECTED = "queue_rejected"
    UPSTREAM_ERROR = "upstream_error"
    UPSTREAM_TIMEOUT = "upstream_timeout"
    CLIENT_CANCELLED = "client_cancelled"
    GATEWAY_ERROR = "gateway_error"


CLIENT_TOO_SLOW = "client_too_slow"
"""Error code of a request whose client was cut off: it had taken nothing of its answer for too long."""


class Attempt(msgspec.Struct, omit_defaults=True):
    """One try at one upstream, with clocks of its own."""

    number: int
    upstream: str
    model: str
    """The upstream's own name of the model."""
    span_id: str
    """Of the CLIENT span; the engine's spans hang below it."""
    connect_start: int = 0
    connected: int = 0
    """Equal to connect_start when the connection was pooled."""
    request_sent: int = 0
    upstream_headers: int = 0
    upstream_first_byte: int = 0
    end: int = 0
    reused: bool = False
    status: int = 0
    error: str | None = None
    """Short and bounded: connect, first_byte, idle, total, status, protocol, cancelled."""
    upstream_request_id: str | None = None
    server_timing: str | None = None
    """The upstream's `Server-Timing` header, as it came; at most 1024 characters."""


class Usage(msgspec.Struct, omit_defaults=True):
    """Token counts and where they came from."""

    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None
    source: str | None = None
    """usage (the upstream's own count) or events (token events counted); None: unknown."""


class Ledger(msgspec.Struct, omit_defaults=True):
    """One request as the relay saw it."""

    request_id: str
    trace_id: str
    span_id: str
    """Of the SERVER span."""
    wall_ns: int
    """Wall time at ingress: the only one that is read."""
    ingress: int
    """ASGI scope seen."""
    parent_span_id: str | None = None
    tracestate: str | None = None
    client_request_id: str | None = None
    worker: int = 0
    surface: str = "unknown"
    """chat, completions, models, …"""
    method: str = ""
    path: str = ""
    stream: bool = False
    model: str = "unknown"
    """Public name; `unknown` when the request did not route."""
    upstream: str = "none"
    """Of the last attempt."""
    key_alias: str | None = None
    team: str | None = None

    authenticated: int = 0
    body_read: int = 0
    routed: int = 0
    admitted: int = 0
    attempts: list[Attempt] = []
    first_event: int = 0
    """Any SSE event, a role-only chunk included (read from the upstream, before translation)."""
    first_token: int = 0
    """First non-empty content, reasoning or tool-call delta."""
    first_visible: int = 0
    """First non-empty content."""
    first_token_written: int = 0
    last_token: int = 0
    """Last content or finish_reason event, whichever is later."""
    upstream_end: int = 0
    finish: int = 0
    """Last byte handed to the transport."""
    client_gone: int = 0
    """The client's connection was seen to be closed."""
    first_reasoning: int = 0
    """First non-empty reasoning delta."""

    client_network_ns: int | None = None
    """Ingress less `X-Request-Start`, on two clocks (trusted proxies only): shown, never summed."""
    client_rtt_ns: int = 0
    """Smoothed round trip of the client's connection by TCP_INFO, at most a second old at the end; 0: unknown."""
    backpressure_ns: int = 0
    """Time in which written bytes had not been taken by the client's connection."""
    unsent_bytes: int = 0
    """Still in the kernel's send queue (SIOCOUTQ) when the last byte was handed over."""
    loop_lag_ns: int = 0
    """Lateness of the worker's event loop, summed from ingress to the first token written (whole answers: the end)."""

    status: int = 0
    outcome: Outcome = Outcome.GATEWAY_ERROR
    error_code: str | None = None
    finish_reason: str | None = None
    choices: int = 1
    """`n` of the request."""
    token_events: int = 0
    usage: Usage = msgspec.field(default_factory=Usage)
    timings: Timings | None = None
    """What the engine reported in band; the fullest one that arrived."""
    request_bytes: int = 0
    response_bytes: int = 0


class Admitted(msgspec.Struct, frozen=True, tag="admitted"):
    """Relay to observer: a request has routed; from now on it waits, for admission and then for its first token."""

    request_id: str
    worker: int
    model: str
    surface: str
    stream: bool
    ingress: int


class FirstToken(msgspec.Struct, frozen=True, tag="first_token"):
    """Relay to observer: TTFT is known. Observed at once, whatever becomes of the stream."""

    request_id: str
    worker: int
    model: str
    upstream: str
    surface: str
    ttft_ns: int
    trace_id: str = ""
    """For the sample's exemplar; empty: the sample has none."""


class Closed(msgspec.Struct, frozen=True, tag="closed"):
    """Relay to observer: the request has ended."""

    ledger: Ledger


class WorkerState(msgspec.Struct, frozen=True, tag="worker"):
    """Relay to observer, once a second and on connection: what only the worker knows."""

    worker: int
    pid: int
    host: HostIdentity
    inflight: dict[str, int]
    """Requests at each upstream now."""
    ledgers_dropped: int
    """Closed records lost since this worker started, because the observer could not take them."""
    draining: bool = False
    queue_depth: int = 0
    """Requests that wait for admission."""
    waiting: dict[str, int] = {}
    """Model -> ingress (monotonic ns) of its oldest admitted or queued request without a first token."""
    breakers: dict[str, int] = {}
    """Upstream -> 0 closed, 1 half open, 2 open."""
    limits_degraded: bool = False
    """Redis can't be asked; this worker limits by itself, or refuses."""
    places: int = 0
    """Requests that it lets be in flight at once: its share of server.max_concurrent_requests."""
    loop_lags: list[int] = []
    """Lateness of the event loop's ticks since the last report, ns; at most 200."""


Record = Admitted | FirstToken | Closed | WorkerState

encode_record = msgspec.msgpack.Encoder().encode
"""Record -> bytes; one frame of the intake socket holds a list of them (see tracing/wire.py)."""
decode_records = msgspec.msgpack.Decoder(list[Record]).decode
