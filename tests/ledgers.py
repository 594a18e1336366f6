"""A request with a timetable in milliseconds, for tests of the timeline. Every interval has a length of its own."""

from __future__ import annotations

from typing import Any

import msgspec

from protocol.timings import EngineMarks, EngineState, HostIdentity, Timings
from tracing.ledger import Attempt, Ledger, Outcome, Usage

BASE_NS = 5_000_000_000
WALL_NS = 1_796_000_000_000_000_000
HERE = HostIdentity("host", "boot")
ELSEWHERE = HostIdentity("other", "boot")

ENGINE_MS = {
    "received": 10.5,
    "queued": 12.5,
    "scheduled": 30.5,
    "prefill_end": 75.5,
    "first_written": 77.0,
    "last_token": 175.5,
}
ATTEMPT_MS = {
    "connect_start": 6.0,
    "connected": 8.5,
    "request_sent": 9.0,
    "upstream_headers": 78.0,
    "upstream_first_byte": 78.5,
    "end": 185.0,
}
LEDGER_MS = {
    "authenticated": 1.0,
    "body_read": 3.0,
    "routed": 4.5,
    "admitted": 6.0,
    "first_event": 79.0,
    "first_token": 80.0,
    "first_visible": 80.0,
    "first_token_written": 81.5,
    "last_token": 180.0,
    "upstream_end": 185.0,
    "finish": 186.0,
}
STREAM_STAGES_MS = {
    "auth": 1.0,
    "receive": 2.0,
    "route": 1.5,
    "gateway_queue": 1.5,
    "connect": 2.5,
    "send": 0.5,
    "transit_out": 1.5,
    "engine_tokenize": 2.0,
    "engine_queue": 18.0,
    "engine_prefill": 45.0,
    "engine_emit": 1.5,
    "transit_back": 3.0,
    "relay": 1.5,
}
"""What the timetable above comes to; sums to 81.5 ms."""


def at(ms: float) -> int:
    """The mark `ms` after ingress."""
    return BASE_NS + round(ms * 1e6)


def attempt(number: int = 1, *, upstream: str = "engine", **changes: Any) -> Attempt:
    """An attempt after ATTEMPT_MS; changes that name a mark are ms (None: never reached)."""
    marks = {name: at(ms) for name, ms in ATTEMPT_MS.items()}
    fields = {"span_id": f"{0xA0 + number:016x}", "status": 200, **marks}
    for name, value in changes.items():
        fields[name] = (0 if value is None else at(value)) if name in ATTEMPT_MS else value
    return Attempt(number=number, upstream=upstream, model="m-upstream", **fields)  # type: ignore[arg-type]


def timings(host: HostIdentity | None = HERE, **changes: Any) -> Timings:
    """What the engine reports after ENGINE_MS; changes that name a mark are ms (None: never reached)."""
    marks = {name: at(ms) for name, ms in ENGINE_MS.items()}
    fields: dict[str, Any] = {
        "tokenize_ms": 2.0,
        "queue_ms": 18.0,
        "prompt_ms": 45.0,
        "predicted_ms": 100.0,
        "prompt_n": 31,
        "predicted_n": 51,
        "steps": 50,
        "mean_batch": 4.0,
        "prefill_chunks": 1,
        "token_gap_ms": 3.0,
        "engine": EngineState(running=3, waiting=1, kv_usage=0.25, batch=4),
    }
    for name, value in changes.items():
        if name in ENGINE_MS:
            marks[name] = None if value is None else at(value)  # type: ignore[assignment]
        else:
            fields[name] = value
    if host is not None:
        fields |= {"marks": EngineMarks(**marks), "host": host}
    return Timings(**fields)


def ledger(**changes: Any) -> Ledger:
    """A good stream after LEDGER_MS; changes that name a mark are ms (None: never reached)."""
    fields: dict[str, Any] = {
        "request_id": "req_1",
        "trace_id": "0af7651916cd43dd8448eb211c80319c",
        "span_id": "00000000000000ff",
        "wall_ns": WALL_NS,
        "ingress": BASE_NS,
        "surface": "chat",
        "method": "POST",
        "path": "/api/v1/chat/completions",
        "stream": True,
        "model": "m",
        "upstream": "engine",
        "attempts": [attempt()],
        "status": 200,
        "outcome": Outcome.OK,
        "finish_reason": "stop",
        "token_events": 51,
        "usage": Usage(input_tokens=31, output_tokens=51, source="usage"),
        "timings": timings(),
        **{name: at(ms) for name, ms in LEDGER_MS.items()},
    }
    for name, value in changes.items():
        if name in LEDGER_MS or name == "client_gone":
            fields[name] = 0 if value is None else at(value)
        else:
            fields[name] = value
    return Ledger(**fields)


def whole(**changes: Any) -> Ledger:
    """A whole answer after the same timetable: the body is written when the last token is there."""
    no_stream = {"first_event": None, "first_token": None, "first_visible": None, "first_token_written": None}
    fields: dict[str, Any] = {"stream": False, "last_token": None, "timings": timings(first_written=178.0), **no_stream}
    return ledger(**(fields | changes))


def numbered(number: int, **changes: Any) -> Ledger:
    """A good stream with ids of its own."""
    made = ledger(**changes)
    for one in made.attempts:
        one.span_id = f"{(number << 8) + one.number + 1:016x}"
    return msgspec.structs.replace(
        made, request_id=f"req_{number}", trace_id=f"{number + 1:032x}", span_id=f"{(number << 8) + 0xFF:016x}"
    )
