"""From a checked request to tokens and limits: what the core is given."""

from __future__ import annotations

from typing import Any

import msgspec

from backend_engine.core.messages import Ready, Sampling
from backend_engine.parameters import Parameters, invalid
from backend_engine.requests import Conversation, Prompt
from backend_engine.text.tokenizer import Tokenizer
from protocol.errors import ApiError

LONG_TEXT = 8192
"""Characters from which on tokenising takes long enough to be done beside the event loop (about 2 ms)."""

_POSITIVE_64 = 2**63 - 1


class Limits(msgspec.Struct, frozen=True):
    """What the loaded model and the settings allow."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_tokens: int | None
    """`model.max_tokens`: default and ceiling of an answer."""

    @classmethod
    def of(cls, ready: Ready, max_tokens: int | None) -> Limits:
        """From the core's own account."""
        return cls(ready.max_model_len, ready.vocab_size, ready.eos_token_ids, max_tokens)


def is_long(source: Conversation | Prompt) -> bool:
    """Worth a thread of its own to tokenise."""
    if isinstance(source, Prompt):
        return source.text is not None and len(source.text) > LONG_TEXT
    return sum(len(message["content"]) for message in source.messages) > LONG_TEXT


def tokens_of(source: Conversation | Prompt, tokenizer: Tokenizer, limits: Limits) -> list[int]:
    """The prompt's token ids. Raises ApiError 400 when there are none, too many, or unknown ones."""
    if isinstance(source, Conversation):
        tokens, param = tokenizer.encode_chat(source.messages), "messages"
    else:
        param = "prompt"
        tokens = _known(source.tokens, limits) if source.tokens is not None else tokenizer.encode(source.text or "")
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
    return tokens


def _known(tokens: list[Any], limits: Limits) -> list[int]:
    return check_token_ids(tokens, "prompt", limits.vocab_size)


def check_token_ids(tokens: list[Any], param: str, vocab_size: int) -> list[int]:
    """The same ids. Raises ApiError 400 for one that is not in the vocabulary."""
    for token in tokens:
        if type(token) is not int or not 0 <= token < vocab_size:
            seen = str(token)[:40]
            raise invalid(param, f"'{param}' holds {seen}, which is not a token id from 0 to {vocab_size - 1}.")
    return tokens


def sampling_for(parameters: Parameters, prompt_tokens: int, limits: Limits) -> Sampling:
    """Sampling for a prompt of this length; an answer too long for the model or the settings is cut to what fits."""
    check_token_ids(list(parameters.stop_token_ids), "stop_token_ids", limits.vocab_size)
    room = limits.max_model_len - prompt_tokens
    asked = [limit for limit in (parameters.max_tokens, limits.max_tokens) if limit is not None]
    eos = () if parameters.ignore_eos else limits.eos_token_ids
    return Sampling(
        max_tokens=min([room, *asked]),
        temperature=parameters.temperature,
        top_p=parameters.top_p,
        top_k=min(parameters.top_k, limits.vocab_size),
        seed=None if parameters.seed is None else parameters.seed & _POSITIVE_64,
        stop_token_ids=tuple(dict.fromkeys((*eos, *parameters.stop_token_ids))),
    )
