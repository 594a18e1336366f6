"""Why a request cannot run, told before it is queued: nobody else's step is spoiled by it then."""

from __future__ import annotations

from backend_engine.core.messages import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_TOKEN_IDS, Ready, Submit

MAX_WAITING = 16_384
"""Requests that may wait in the core's queue; one more is refused with `queue_full`."""

Refusal = tuple[str, str]
"""Error code, and the text that the client reads."""


def refusal_of(submit: Submit, info: Ready, waiting: int) -> Refusal | None:
    """None when it can run."""
    text = _prompt(submit.prompt, info.vocab_size) or _sampling(submit, info.vocab_size)
    if text is not None:
        return "invalid_prompt", text
    if len(submit.prompt) >= info.max_model_len:
        return (
            "context_length_exceeded",
            f"The prompt has {len(submit.prompt)} tokens and the model's limit is {info.max_model_len}, answer "
            "included; shorten the prompt.",
        )
    if waiting >= MAX_WAITING:
        return "queue_full", f"{MAX_WAITING} requests wait in the engine already; try again later."
    return None


def _prompt(prompt: list[int], vocab_size: int) -> str | None:
    if not prompt:
        return "The prompt has no tokens; send at least one."
    worst = min(prompt) if min(prompt) < 0 else max(prompt)
    if not 0 <= worst < vocab_size:
        return f"Token id {worst} is not in the model's vocabulary of {vocab_size} ids."
    return None


def _sampling(submit: Submit, vocab_size: int) -> str | None:
    sampling = submit.sampling
    if sampling.max_tokens < 1:
        return f"max_tokens = {sampling.max_tokens}: it must be at least 1."
    for name, count, most in (
        ("stop_token_ids", len(sampling.stop_token_ids), MAX_STOP_TOKEN_IDS),
        ("logit_bias", len(sampling.logit_bias), MAX_LOGIT_BIAS),
        ("logprobs", sampling.logprobs or 0, MAX_LOGPROBS),
    ):
        if count > most:
            return f"{name} asks for {count}; this engine has room for {most}."
    strange = next((token for token, _ in sampling.logit_bias if not 0 <= token < vocab_size), None)
    if strange is not None:
        return f"logit_bias names token id {strange}, and the model's vocabulary has {vocab_size} ids."
    return None
