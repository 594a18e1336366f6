"""What the frontend and the engine core say to each other (msgpack over ZeroMQ). Times are monotonic ns."""

from __future__ import annotations

import msgspec

from protocol.timings import EngineState

MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 512
MAX_LOGPROBS = 20
"""What the device's slots have room for; the core refuses a request that asks for more."""


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the next token is chosen, already validated by the frontend."""

    max_tokens: int
    temperature: float = 1.0
    """0: greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0: off."""
    seed: int | None = None
    """None: not reproducible."""
    stop_token_ids: tuple[int, ...] = ()
    """EOS ids included; the stop token itself is not part of the answer's text."""

    # Each of the following needs the feature that stands beside it; the frontend refuses what `Ready.features` lacks.
    min_p: float = 0.0  # min_p
    """0: off. Tokens less likely than this share of the likeliest are ruled out, after temperature."""
    repetition_penalty: float = 1.0  # penalties
    """1: off. Logits of tokens in prompt or answer are divided by it if positive, else multiplied."""
    presence_penalty: float = 0.0  # penalties
    """Taken off the logit of every token that the answer holds."""
    frequency_penalty: float = 0.0  # penalties
    """Taken off the logit of a token once for each time that the answer holds it."""
    logit_bias: tuple[tuple[int, float], ...] = ()  # logit_bias
    """Token id and what is added to its logit."""
    logprobs: int | None = None  # logprobs
    """None: off. Else every token comes with its log probability and those of this many best (0: of itself alone), of
    the model's own distribution: before temperature, penalties, bias and cuts."""
    min_tokens: int = 0  # min_tokens
    """No id of `stop_token_ids` is sampled before the answer has this many tokens."""
    is_masked: bool = False  # masks
    """Output n (from 0) is not sampled before the request's `Mask` n is there."""


class Mask(msgspec.Struct, frozen=True, tag="mask"):
    """Frontend to core: which tokens may be output n of a request whose sampling `is_masked`. Masks of a request come
    in order and once each; the mask of output n is made from output n-1, so such a request is in every second step of
    the pipeline at most. A mask for a request that is not there any more means nothing."""

    request_id: str
    output: int
    """n: how many tokens the answer has already."""
    allowed: bytes
    """One bit per token id, lowest bit first, in 32-bit little-endian words: ceil(vocab_size / 32) of them."""


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """Frontend to core: a new request, queued from now on."""

    request_id: str
    prompt: list[int]
    sampling: Sampling
    queued_ns: int


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Frontend to core: nobody waits for this request any more (client gone, or a stop string was found)."""

    request_id: str
    asked_ns: int


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Frontend to core: end in order."""


class Scheduled(msgspec.Struct, frozen=True):
    """What is known when the first token is sampled; comes with the request's first output."""

    scheduled_ns: int
    prefill_end_ns: int
    prefill_chunks: int
    cached_tokens: int
    state: EngineState


class Finished(msgspec.Struct, frozen=True):
    """What is known at the end; comes with the request's last output."""

    reason: str
    """stop (a stop token), length, abort or error."""
    last_token_ns: int | None
    """End of the step that sampled the last token; None if there was none."""
    ended_ns: int
    """When the end was settled; for an abort, when slot and pages were given back."""
    output_tokens: int
    steps: int
    batch_sum: int
    """Sum over those steps of the sequences in each; mean batch = batch_sum / steps."""
    gap_ns: int
    """Time between steps inside the request's decode."""
    wasted_tokens: int = 0
    """Tokens sampled after the abort was asked for."""
    preemptions: int = 0
    preempted_ns: int = 0
    preempted_at_ns: tuple[int, ...] = ()
    """When each preemption took slot and pages; `preempted_ns` is how long it waited for them again, in all."""
    error: str | None = None
    error_code: str | None = None
    scheduled_ns: int | None = None
    """Start of the step with the first prefill chunk, known here even when no token was ever sampled."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """One sampled token's log probability, and the likeliest tokens' at its place, best first."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class Output(msgspec.Struct, frozen=True):
    """New tokens of one request after one step. Both first and last output may be the same one."""

    request_id: str
    tokens: list[int]
    step_end_ns: int
    scheduled: Scheduled | None = None
    finished: Finished | None = None
    logprobs: list[TokenLogprobs] | None = None
    """One for each of `tokens`, if the request asked."""


class Step(msgspec.Struct, frozen=True):
    """One step, for metrics. Durations in ns."""

    batch: int
    """Sequences in the step."""
    tokens: int
    """Tokens in the step, prefill and decode."""
    forward_ns: int
    gap_ns: int | None
    """Step start minus the previous step's end while any request ran or waited; None after idleness."""
    schedule_ns: int
    slot_kernel_ns: int


class Gauges(msgspec.Struct, frozen=True):
    """The core's state after a step, when it goes idle and after aborts."""

    running: int
    waiting: int
    kv_used: int
    """Pages in use."""
    kv_pages: int
    """Pages in all."""
    kv_cached: int = 0
    """Pages that no request uses and that hold a prefix which may be asked for again."""
    prefix_queries_total: int = 0
    """Prompt tokens looked up in the prefix cache since the start, once for each request."""
    prefix_hits_total: int = 0
    """Those of them that were found."""
    evictions_total: int = 0
    """Cached pages that were given to another use since the start."""
    preemptions_total: int = 0
    ooms_total: int = 0
    """Steps that ran out of device memory since the start."""


class Outputs(msgspec.Struct, frozen=True, tag="outputs"):
    """Core to frontend: everything that one turn of the loop had to say."""

    outputs: list[Output]
    steps: list[Step]
    gauges: Gauges


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Core to frontend: the model is loaded."""

    device: str
    """cpu, cuda or simulated."""
    dtype: str
    max_model_len: int
    vocab_size: int
    weight_bytes: int
    kv_pages: int
    page_size: int
    eos_token_ids: tuple[int, ...]
    async_scheduling: bool = False
    """What runs, which may be less than what the settings ask for; likewise `slot_reuse`."""
    slot_reuse: bool = False
    features: tuple[str, ...] = ()
    """What of `Sampling` the core does beyond the basics: min_p, penalties, logit_bias, logprobs, min_tokens, masks."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """Core to frontend: it cannot serve; `message` names the cause and the fix."""

    message: str


ToCore = Submit | Abort | Mask | Shutdown
FromCore = Ready | Outputs | Failed

encode = msgspec.msgpack.Encoder().encode
decode_to_core = msgspec.msgpack.Decoder(ToCore).decode
decode_from_core = msgspec.msgpack.Decoder(FromCore).decode
