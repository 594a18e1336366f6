"""From a checked request to limits and sampling: what the core is given."""

from __future__ import annotations

from typing import Any

import msgspec

from backend_engine.core.messages import MAX_STOP_TOKEN_IDS, Ready, Sampling
from backend_engine.fields import invalid, unsupported
from backend_engine.parameters import Parameters
from backend_engine.requests import GenerationRequest
from backend_engine.text.wire import Prompt
from backend_engine.tools import tools_grammar
from protocol.errors import ApiError

LETTERS_PER_TOKEN = 256
"""More than any vocabulary's longest token has; an ordinary one has about four."""
_POSITIVE_64 = 2**63 - 1


class Limits(msgspec.Struct, frozen=True):
    """What the loaded model and the settings allow."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_tokens: int | None
    """`model.max_tokens`: default and ceiling of an answer."""
    features: frozenset[str] = frozenset()
    """Of the core; see `Ready.features`."""

    @classmethod
    def of(cls, ready: Ready, max_tokens: int | None) -> Limits:
        """From the core's own account."""
        return cls(ready.max_model_len, ready.vocab_size, ready.eos_token_ids, max_tokens, frozenset(ready.features))


def check_request(request: GenerationRequest, limits: Limits, tool_format: str | None) -> str | None:
    """What can be told before tokenising; returns the answer's grammar. Raises ApiError 400."""
    parameters = request.parameters
    for feature, field in parameters.features().items():
        if feature not in limits.features:
            raise unsupported(
                field,
                f"'{field}' is not built in the core that serves this model. Leave it out, or use another upstream.",
            )
    check_token_ids(list(parameters.stop_token_ids), "stop_token_ids", limits.vocab_size)
    stop_ids = _stop_ids(parameters, limits)
    if len(stop_ids) > MAX_STOP_TOKEN_IDS:
        raise invalid(
            "stop_token_ids",
            f"'stop_token_ids' and the model's own make {len(stop_ids)}; at most {MAX_STOP_TOKEN_IDS} are possible.",
        )
    check_token_ids([token for token, _ in parameters.logit_bias], "logit_bias", limits.vocab_size)
    if isinstance(request.source, Prompt) and request.source.tokens is not None:
        check_token_ids(request.source.tokens, "prompt", limits.vocab_size)
    grammar, param = request.grammar, "response_format"
    if request.tools.param is not None:
        if tool_format is None:
            raise unsupported(
                request.tools.param,
                "This model's chat template has no tools (or writes calls in a form that is not known here). "
                "Leave 'tools' out, or use a model whose template has them in Hermes' or Llama 3's form.",
            )
        if request.tools.must_call:
            grammar, param = tools_grammar(request.tools, tool_format), "tool_choice"
    if grammar is not None and "masks" not in limits.features:
        raise unsupported(
            param, f"This '{param}' needs constrained sampling, which is not built in the core that serves this model."
        )
    return grammar


def _stop_ids(parameters: Parameters, limits: Limits) -> tuple[int, ...]:
    eos = () if parameters.ignore_eos else limits.eos_token_ids
    return tuple(dict.fromkeys((*eos, *parameters.stop_token_ids)))


def check_letters(request: GenerationRequest, limits: Limits) -> None:
    """Raises ApiError 400 for a text so long that its tokens can't fit, before it keeps the tokenizer from others."""
    source = request.source
    texts = [source.text or ""] if isinstance(source, Prompt) else [one["content"] for one in source.messages]
    letters = sum(map(len, texts))
    if letters > LETTERS_PER_TOKEN * limits.max_model_len:
        raise ApiError(
            400,
            "context_length_exceeded",
            f"The prompt has {letters} characters, which are more than this model's limit of {limits.max_model_len} "
            "tokens can hold. Shorten the prompt.",
            param=request.param,
        )


def check_prompt(tokens: list[int], param: str, limits: Limits) -> None:
    """Raises ApiError 400 when there are no tokens, or too many."""
    if not tokens:
        raise invalid(param, f"'{param}' holds no token; send some text.")
    if len(tokens) >= limits.max_model_len:
        raise ApiError(
            400,
            "context_length_exceeded",
            f"The prompt has {len(tokens)} tokens, but this model's limit is {limits.max_model_len} tokens, of which "
            "at least 1 is for the answer. Shorten the prompt.",
            param=param,
        )


def check_token_ids(tokens: list[Any], param: str, vocab_size: int) -> list[int]:
    """The same ids. Raises ApiError 400 for one that is not in the vocabulary."""
    for token in tokens:
        if type(token) is not int or not 0 <= token < vocab_size:
            seen = str(token)[:40]
            raise invalid(param, f"'{param}' holds {seen}, which is not a token id from 0 to {vocab_size - 1}.")
    return tokens


def sampling_for(
    parameters: Parameters, prompt_tokens: int, limits: Limits, *, choice: int = 0, is_masked: bool = False
) -> Sampling:
    """Sampling for a prompt of this length; an answer too long for the model or the settings is cut to what fits.
    Choices of one seeded request have seeds that follow each other."""
    room = limits.max_model_len - prompt_tokens
    asked = [limit for limit in (parameters.max_tokens, limits.max_tokens) if limit is not None]
    max_tokens = min([room, *asked])
    return Sampling(
        max_tokens=max_tokens,
        temperature=parameters.temperature,
        top_p=parameters.top_p,
        top_k=min(parameters.top_k, limits.vocab_size),
        seed=None if parameters.seed is None else (parameters.seed + choice) & _POSITIVE_64,
        stop_token_ids=_stop_ids(parameters, limits),
        min_p=parameters.min_p,
        repetition_penalty=parameters.repetition_penalty,
        presence_penalty=parameters.presence_penalty,
        frequency_penalty=parameters.frequency_penalty,
        logit_bias=parameters.logit_bias,
        logprobs=None if parameters.logprobs is None else min(parameters.logprobs, limits.vocab_size),
        min_tokens=min(parameters.min_tokens, max_tokens),
        is_masked=is_masked,
    )
