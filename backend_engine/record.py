"""One request inside the engine, from the first sight of it to its last byte: marks and facts, each set once.

Timings, spans and metrics are all read off this record. Times are monotonic ns of the frontend's clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from backend_engine.core.messages import Finished, Scheduled
from protocol.errors import ApiError
from protocol.timings import EngineMarks, HostIdentity, Timings

Surface = Literal["chat", "completions"]

OK, CLIENT_ERROR, CLIENT_CANCELLED, FAILED = "ok", "client_error", "client_cancelled", "upstream_error"


@dataclass(slots=True)
class RequestRecord:
    """What is known of one request so far. None: not reached, or unknown."""

    surface: Surface
    answer_id: str
    received_ns: int
    """The whole request had arrived; of one whose body never did, its headers."""
    received_wall_ns: int
    """The one wall-clock reading; every other instant is placed by its monotonic distance from `received_ns`."""
    parent: tuple[str, str, int] | None = None
    """Trace id, span id and flags of the caller's span."""
    gateway_request_id: str | None = None

    is_stream: bool | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    prompt_tokens: int | None = None

    queued_ns: int | None = None
    scheduled: Scheduled | None = None
    first_written_ns: int | None = None
    last_written_ns: int | None = None
    last_token_ns: int | None = None
    output_tokens: int = 0
    finish_reason: str | None = None
    """stop or length, once every choice's text has ended; of the one that ended last."""
    finish_reasons: tuple[str, ...] = ()
    """Of each choice."""
    finished: Finished | None = None
    """The core's own account of the end."""

    left_ns: int | None = None
    """The client was seen to be gone."""
    error: ApiError | None = None
    ended_ns: int | None = None
    """Nothing more is written, whatever the reason."""

    def received(self, now_ns: int) -> None:
        """The body is complete."""
        self.received_wall_ns += now_ns - self.received_ns
        self.received_ns = now_ns

    @property
    def outcome(self) -> str:
        """In the gateway's words for its upstreams."""
        if self.left_ns is not None:
            return CLIENT_CANCELLED
        if self.error is not None:
            return CLIENT_ERROR if self.error.status < 500 else FAILED
        return OK

    @property
    def scheduled_ns(self) -> int | None:
        """Start of the first prefill step; for a request that got no token, from the core's last word on it."""
        if self.scheduled is not None:
            return self.scheduled.scheduled_ns
        return self.finished.scheduled_ns if self.finished is not None else None

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed."""
        return self.scheduled.cached_tokens if self.scheduled is not None else 0


def _ms(start: int | None, end: int | None) -> float | None:
    return None if start is None or end is None else (end - start) / 1e6


def timings_of(record: RequestRecord, host: HostIdentity, *, is_simulated: bool, is_last: bool) -> Timings:
    """The in-band report: queue and prefill on the first event, everything on the last.

    Per-token times of the answer are over the tokens after the first, since the first is prefill's. What only the core
    knows of a request's end (steps, mean batch, gaps) is absent when the end was found here, by a stop string.
    """
    scheduled = record.scheduled
    prefill_end = scheduled.prefill_end_ns if scheduled else None
    prompt_ms = _ms(record.scheduled_ns, prefill_end)
    computed = (record.prompt_tokens or 0) - record.cached_tokens
    marks = EngineMarks(
        received=record.received_ns,
        queued=record.queued_ns,
        scheduled=record.scheduled_ns,
        prefill_end=prefill_end,
        first_written=record.first_written_ns,
        last_token=record.last_token_ns if is_last else None,
    )
    known: dict[str, Any] = {
        "cache_n": record.cached_tokens,
        "prompt_n": computed,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / computed if prompt_ms is not None and computed else None,
        "prompt_per_second": computed / prompt_ms * 1e3 if prompt_ms else None,
        "tokenize_ms": _ms(record.received_ns, record.queued_ns),
        "queue_ms": _ms(record.queued_ns, record.scheduled_ns),
        "prefill_chunks": scheduled.prefill_chunks if scheduled else None,
        "simulated": is_simulated or None,
    }
    if is_last:
        known |= _decode_report(record, prefill_end)
    return Timings(**known, marks=marks, host=host, engine=scheduled.state if scheduled else None)


def _decode_report(record: RequestRecord, prefill_end: int | None) -> dict[str, Any]:
    decode_ms = _ms(prefill_end, record.last_token_ns)
    after_first = record.output_tokens - 1
    found: dict[str, Any] = {
        "predicted_n": record.output_tokens,
        "predicted_ms": decode_ms,
        "predicted_per_token_ms": decode_ms / after_first if decode_ms is not None and after_first > 0 else None,
        "predicted_per_second": after_first / decode_ms * 1e3 if decode_ms and after_first > 0 else None,
    }
    finished = record.finished
    if finished is not None:
        found |= {
            "steps": finished.steps,
            "mean_batch": finished.batch_sum / finished.steps if finished.steps else None,
            "token_gap_ms": finished.gap_ns / 1e6,
            "preemptions": finished.preemptions,
            "preempted_ms": finished.preempted_ns / 1e6,
        }
    return found
