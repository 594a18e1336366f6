"""The table of causes: why a request can be slow, and what to do about it, in words for machines.

Each row is one cause with one action and the evidence it takes; docs/verdict.md is checked against it, and
`texts` has each row's sentences. Actions keep an order: queue and KV cache before hardware; TTFT: prompt and prefill;
TPOT: batch and bandwidth; network: the link, not the engine.
"""

from __future__ import annotations

import enum

import msgspec

Numbers = dict[str, str | float | None]
"""Evidence that a text tells: seconds, shares, tokens, bytes, names; None: unknown."""


class Cause(enum.StrEnum):
    """Why."""

    GATEWAY_QUEUE = "gateway_queue"
    GATEWAY_BUSY = "gateway_busy"
    UPSTREAM_FAILURE = "upstream_failure"
    NETWORK = "network"
    ENGINE_QUEUE = "engine_queue"
    LONG_UNCACHED_PROMPT = "long_uncached_prompt"
    PREFILL_SQUEEZED = "prefill_squeezed"
    LARGE_BATCH = "large_batch"
    LONG_OUTPUT = "long_output"
    PREEMPTED = "preempted"
    SLOW_CLIENT = "slow_client"
    SLOW_UPSTREAM = "slow_upstream"
    NONE = "none"
    UNKNOWN = "unknown"


class Confidence(enum.StrEnum):
    """How sure."""

    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"


class Remedy(msgspec.Struct, frozen=True):
    """One row: a cause, what to do, and when the row applies."""

    cause: Cause
    action: str
    when: str

    @property
    def name(self) -> str:
        """The row's name; its texts have the same."""
        return f"{self.cause}.{self.action}"


class Finding(msgspec.Struct, frozen=True):
    """What the evidence comes to."""

    remedy: Remedy
    stage: str | None
    """The stage that made the difference, or that the request died in."""
    certain: bool = True
    """False: the remedy fits, but part of the evidence for it is missing."""
    failed: bool = False
    """The request was refused or failed: the error itself is the evidence, no baseline is needed."""
    numbers: Numbers = {}
    """What the row's texts tell beside the stage's own numbers."""


TABLE: tuple[Remedy, ...] = (
    Remedy(Cause.GATEWAY_QUEUE, "raise_max_concurrent", "`gateway_queue` has the largest excess"),
    Remedy(Cause.GATEWAY_QUEUE, "enlarge_gateway_queue", "refused, or given up, because the gateway was full"),
    Remedy(Cause.GATEWAY_BUSY, "relieve_gateway", "event-loop lag explains at least half of the excess"),
    Remedy(Cause.UPSTREAM_FAILURE, "replace_upstream", "`failed_attempts` has the largest excess"),
    Remedy(Cause.UPSTREAM_FAILURE, "mend_upstream", "the request ended with an upstream's error"),
    Remedy(
        Cause.UPSTREAM_FAILURE,
        "revive_upstreams",
        "no upstream was asked, because each of the model's had failed repeatedly just before",
    ),
    Remedy(
        Cause.NETWORK,
        "check_link",
        "`connect` or `send` has the largest excess; `transit` only when those two were slow as well",
    ),
    Remedy(
        Cause.NETWORK,
        "check_client_link",
        "`receive` has the largest excess and the client's TCP round trip is at least twice the usual one",
    ),
    Remedy(
        Cause.ENGINE_QUEUE,
        "enlarge_kv_cache",
        "`engine_queue` has the largest excess and under 20 % of the KV cache was free",
    ),
    Remedy(
        Cause.ENGINE_QUEUE,
        "raise_max_num_seqs",
        "`engine_queue` has the largest excess, every slot was taken, and the KV cache had room",
    ),
    Remedy(Cause.ENGINE_QUEUE, "spread_load", "`engine_queue` has the largest excess, with slots free or unknown"),
    Remedy(
        Cause.LONG_UNCACHED_PROMPT,
        "shorten_prompt",
        "`engine_prefill` has the largest excess, more prompt tokens than usual explain at least half of it, "
        "and the prompt was longer than usual",
    ),
    Remedy(
        Cause.LONG_UNCACHED_PROMPT,
        "keep_prefix",
        "the same, but the prompt was of ordinary length: less of it was found in the cache",
    ),
    Remedy(
        Cause.PREFILL_SQUEEZED,
        "tune_batched_tokens",
        "`engine_prefill` has the largest excess, its tokens don't explain it, and others were in the batch",
    ),
    Remedy(
        Cause.LARGE_BATCH,
        "lower_max_num_seqs",
        "time per output token is over the usual one and its steps held at least 1.3 times the usual batch",
    ),
    Remedy(
        Cause.LARGE_BATCH,
        "enable_chunked_prefill",
        "time per output token is over the usual one in an ordinary batch, and chunked prefill is off",
    ),
    Remedy(
        Cause.LONG_OUTPUT,
        "bound_output",
        "more output tokens (at least 1.5 times the usual number) explain more of the excess than slower ones do",
    ),
    Remedy(Cause.PREEMPTED, "enlarge_kv_cache", "the time for which it was preempted is at least half of the excess"),
    Remedy(
        Cause.SLOW_CLIENT,
        "check_client_reading",
        "written bytes had not been taken by the client for at least half of the excess (of the streaming, when the "
        "request itself was not slow)",
    ),
    Remedy(Cause.SLOW_CLIENT, "check_client_upload", "`receive` has the largest excess"),
    Remedy(
        Cause.SLOW_UPSTREAM,
        "ask_upstream",
        "`upstream_wait`, or the stream's tokens, have the largest excess, and the upstream reports nothing about it",
    ),
    Remedy(
        Cause.SLOW_UPSTREAM,
        "shrink_token_gap",
        "time per output token is over the usual one and the time between steps explains at least half of it",
    ),
    Remedy(Cause.SLOW_UPSTREAM, "free_engine_cpu", "`engine_tokenize` or `engine_emit` has the largest excess"),
    Remedy(
        Cause.SLOW_UPSTREAM,
        "check_device",
        "prefill or decode took longer for the usual work in the usual company, by the engine's own figures",
    ),
    Remedy(Cause.SLOW_UPSTREAM, "check_timeout", "the gateway gave the upstream up when a timeout passed"),
    Remedy(Cause.NONE, "nothing", "not slow against its class"),
    Remedy(Cause.NONE, "mend_request", "refused for what it asked, or by a limit of its key"),
    Remedy(
        Cause.UNKNOWN,
        "check_gateway",
        "`auth`, `route` or `relay` has the largest excess and event-loop lag doesn't explain it",
    ),
    Remedy(
        Cause.UNKNOWN,
        "check_host",
        "`transit_out`, `transit_back` or `unaccounted` has the largest excess: two processes of one host",
    ),
    Remedy(
        Cause.UNKNOWN,
        "measure_link",
        "`transit` has the largest excess and neither `connect` nor `send` was slow: a residual is no evidence",
    ),
    Remedy(Cause.UNKNOWN, "gather_evidence", "the largest excess is known, but nothing says where it comes from"),
    Remedy(Cause.UNKNOWN, "read_gateway_log", "the request ended with an error of the gateway itself"),
)

_BY_NAME = {remedy.name: remedy for remedy in TABLE}


def remedy(cause: Cause, action: str) -> Remedy:
    """The row with this cause and action."""
    return _BY_NAME[f"{cause}.{action}"]
