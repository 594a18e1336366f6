"""The `timings` object that an engine reports in band: llama.cpp's keys, and ours beside them.

Durations are milliseconds. Marks are nanoseconds of the reporting host's CLOCK_MONOTONIC and mean something only to a
reader on the same boot of the same host (`HostIdentity`); elsewhere durations alone are used.

On a stream the object comes twice: on the first token's event (queue and prefill are known) and on the last event with
a finish_reason (all of it). On a whole answer it is a key of the body.
"""

from __future__ import annotations

import msgspec


class HostIdentity(msgspec.Struct, frozen=True):
    """Which clock the marks belong to: host, boot and time namespace. Equal identities share CLOCK_MONOTONIC."""

    host_id: str
    boot_id: str
    time_namespace: str = ""


class EngineMarks(msgspec.Struct, frozen=True, omit_defaults=True):
    """Instants inside the engine, monotonic ns. None: not reached yet, or unknown."""

    received: int | None = None
    """The engine's frontend had the whole request."""
    queued: int | None = None
    """Tokenised and handed to the scheduler."""
    scheduled: int | None = None
    """Start of the step that holds the first prefill chunk (first time only, preemption does not move it)."""
    prefill_end: int | None = None
    """End of the step that holds the last prefill chunk: the first token is sampled."""
    first_written: int | None = None
    """The first token's event is about to be written (on a whole answer: the body)."""
    last_token: int | None = None
    """End of the step that sampled the last token."""


class EngineState(msgspec.Struct, frozen=True):
    """The engine when the request was first scheduled."""

    running: int
    """Requests in slots, this one included."""
    waiting: int
    """Requests still queued."""
    kv_usage: float
    """Share of KV pages in use, 0 to 1."""
    batch: int
    """Sequences in the step."""


class Timings(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the engine knows of one request. Unknown keys of other engines are ignored when read."""

    cache_n: int | None = None
    """Prompt tokens found in the prefix cache."""
    prompt_n: int | None = None
    """Prompt tokens computed."""
    prompt_ms: float | None = None
    """Prefill: scheduled to prefill_end."""
    prompt_per_token_ms: float | None = None
    prompt_per_second: float | None = None
    predicted_n: int | None = None
    """Output tokens."""
    predicted_ms: float | None = None
    """Decode: prefill_end to last_token."""
    predicted_per_token_ms: float | None = None
    predicted_per_second: float | None = None

    tokenize_ms: float | None = None
    """received to queued."""
    queue_ms: float | None = None
    """queued to scheduled."""
    prefill_chunks: int | None = None
    steps: int | None = None
    """Decode steps that held the request."""
    mean_batch: float | None = None
    """Mean sequences in those steps."""
    token_gap_ms: float | None = None
    """Time between steps inside the request's decode."""
    preemptions: int | None = None
    preempted_ms: float | None = None
    simulated: bool | None = None
    """True when the device was simulated."""

    marks: EngineMarks | None = None
    host: HostIdentity | None = None
    engine: EngineState | None = None


MAX_MS = 1e9
MAX_COUNT = 2**40
_ORDER = ("received", "queued", "scheduled", "prefill_end", "first_written")
_COUNTS = ("cache_n", "prompt_n", "predicted_n", "prefill_chunks", "steps", "preemptions")


def plausible(timings: Timings, ours: HostIdentity, sent_ns: int, now_ns: int) -> Timings | None:
    """A stranger's report if it can be true, None if not.

    Durations must be finite and from 0 to MAX_MS, counts from 0 to MAX_COUNT. Marks that claim to be of our own clock
    are kept only where they lie between `sent_ns` and `now_ns`, in the order in which they are reached.
    """
    for name in timings.__struct_fields__:
        value = getattr(timings, name)
        limit = MAX_COUNT if name in _COUNTS else MAX_MS
        if isinstance(value, int | float) and not 0 <= value <= limit:
            return None
    marks = timings.marks
    if marks is None or timings.host != ours:
        return timings
    reached = [mark for name in _ORDER if (mark := getattr(marks, name)) is not None]
    last_token = sent_ns if marks.last_token is None else marks.last_token
    possible = reached == sorted(reached) and all(sent_ns <= mark <= now_ns for mark in (*reached, last_token))
    return timings if possible else msgspec.structs.replace(timings, marks=None)
