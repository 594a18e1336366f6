"""Sampling parameters of a request: types and ranges of those that are built in, a refusal for those that are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from backend_engine.core.messages import MAX_LOGIT_BIAS, MAX_LOGPROBS
from backend_engine.fields import Fields, flag, integer, invalid, number, positive, shown, unsupported

MAX_STOPS = 16
MAX_STOP_LETTERS = 256
MAX_CHOICES = 128
MAX_REPETITION_PENALTY = 10.0
_LARGEST = 2**31 - 1
_SEEDS = (-(2**63), 2**63 - 1)


class Parameters(msgspec.Struct, frozen=True):
    """What the client asked for, checked but not yet cut to what fits the model."""

    max_tokens: int | None
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    logprobs: int | None
    """None: none are wanted; else how many alternatives to each token."""
    seed: int | None
    stops: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    choices: int
    """Answers to the one prompt: `n`."""
    is_stream: bool
    wants_usage: bool

    def features(self) -> dict[str, str]:
        """What of a core's features this needs -> the field that asked."""
        penalties = [
            name
            for name, off in (("repetition_penalty", 1.0), ("presence_penalty", 0.0), ("frequency_penalty", 0.0))
            if getattr(self, name) != off
        ]
        wanted = {
            "min_p": "min_p" if self.min_p else "",
            "penalties": penalties[0] if penalties else "",
            "logit_bias": "logit_bias" if self.logit_bias else "",
            "logprobs": "logprobs" if self.logprobs is not None else "",
            "min_tokens": "min_tokens" if self.min_tokens else "",
        }
        return {feature: field for feature, field in wanted.items() if field}


def parse_parameters(fields: Fields, *, is_chat: bool) -> Parameters:
    """Raises ApiError 400 that names the parameter, its value and what is possible."""
    _refuse_unbuilt(fields)
    is_stream = flag(fields, "stream")
    asked = [integer(fields, name, 1, _LARGEST) for name in ("max_completion_tokens", "max_tokens")]
    max_tokens = next((limit for limit in asked if limit is not None), None)
    return Parameters(
        max_tokens=max_tokens,
        min_tokens=_min_tokens(fields, max_tokens),
        temperature=number(fields, "temperature", 1.0, 0.0, 2.0),
        top_p=positive(fields, "top_p", 1.0),
        top_k=max(0, integer(fields, "top_k", -1, _LARGEST) or 0),
        min_p=number(fields, "min_p", 0.0, 0.0, 1.0),
        repetition_penalty=positive(fields, "repetition_penalty", MAX_REPETITION_PENALTY),
        presence_penalty=number(fields, "presence_penalty", 0.0, -2.0, 2.0),
        frequency_penalty=number(fields, "frequency_penalty", 0.0, -2.0, 2.0),
        logit_bias=_logit_bias(fields.get("logit_bias")),
        logprobs=_chat_logprobs(fields) if is_chat else integer(fields, "logprobs", 0, MAX_LOGPROBS),
        seed=integer(fields, "seed", *_SEEDS),
        stops=_stops(fields.get("stop")),
        stop_token_ids=_token_ids(fields),
        ignore_eos=flag(fields, "ignore_eos"),
        choices=_choices(fields),
        is_stream=is_stream,
        wants_usage=_wants_usage(fields.get("stream_options"), is_stream=is_stream),
    )


def _min_tokens(fields: Fields, max_tokens: int | None) -> int:
    least = integer(fields, "min_tokens", 0, _LARGEST) or 0
    if max_tokens is not None and least > max_tokens:
        raise invalid("min_tokens", f"'min_tokens' must be at most the largest length, {max_tokens}, not {least}.")
    return least


def _choices(fields: Fields) -> int:
    choices = integer(fields, "n", 1, MAX_CHOICES) or 1
    best_of = integer(fields, "best_of", 1, MAX_CHOICES)
    if best_of is not None and best_of != choices:
        raise unsupported(
            "best_of", f"'best_of' is {best_of} and 'n' is {choices}; choosing the best is not built, leave it out."
        )
    return choices


def _chat_logprobs(fields: Fields) -> int | None:
    wanted = flag(fields, "logprobs")
    top = integer(fields, "top_logprobs", 0, MAX_LOGPROBS)
    if wanted:
        return top or 0
    if top:
        raise invalid("top_logprobs", f"'top_logprobs' is {top}, which needs 'logprobs': true.")
    return None


def _logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise invalid("logit_bias", f"'logit_bias' must be an object of token ids and numbers, not {shown(value)}.")
    if len(value) > MAX_LOGIT_BIAS:
        raise invalid("logit_bias", f"'logit_bias' may hold at most {MAX_LOGIT_BIAS} tokens, not {len(value)}.")
    found = {}
    for name, bias in value.items():
        if not (name.isascii() and name.isdecimal()) or int(name) > _LARGEST:
            raise invalid("logit_bias", f"'logit_bias' holds {shown(name)}, which is not a token id.")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise invalid(
                "logit_bias", f"'logit_bias' of token {name} must be a number from -100 to 100, not {shown(bias)}."
            )
        found[int(name)] = float(bias)
    return tuple(found.items())


def _stops(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise invalid("stop", f"'stop' must be a string or a list of strings, not {shown(value)}.")
    if len(stops) > MAX_STOPS:
        raise invalid("stop", f"'stop' may hold at most {MAX_STOPS} strings, not {len(stops)}.")
    if not all(stops):
        raise invalid("stop", "'stop' holds an empty string, at which every answer would end. Leave it out.")
    if any(len(stop) > MAX_STOP_LETTERS for stop in stops):
        raise invalid("stop", f"'stop' holds a string of more than {MAX_STOP_LETTERS} characters.")
    return tuple(stops)


def _token_ids(fields: Fields) -> tuple[int, ...]:
    value = fields.get("stop_token_ids")
    if value is None:
        return ()
    if not isinstance(value, list) or not all(type(token) is int and 0 <= token <= _LARGEST for token in value):
        raise invalid("stop_token_ids", f"'stop_token_ids' must be a list of token ids, not {shown(value)}.")
    return tuple(value)


def _wants_usage(options: Any, *, is_stream: bool) -> bool:
    if options is None:
        return False
    if not isinstance(options, dict):
        raise invalid("stream_options", f"'stream_options' must be an object, not {shown(options)}.")
    if not is_stream:
        raise invalid("stream_options", "'stream_options' is allowed only with 'stream': true.")
    return flag(options, "include_usage")


def _is_zero(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and value == 0


def _is_off(value: Any) -> bool:
    return value is False or value in ([], {}, "none", "auto", "")


_USE_FORMAT = "use 'response_format' with a JSON schema, or route it to another upstream"
_UNBUILT: dict[str, tuple[Callable[[Any], bool], str]] = {
    "prompt_logprobs": (_is_zero, "log probabilities of the prompt are not built; leave it out"),
    "functions": (_is_off, "the older function calls are not built; use 'tools'"),
    "function_call": (_is_off, "the older function calls are not built; use 'tool_choice'"),
    "structured_outputs": (_is_off, _USE_FORMAT),
    "guided_json": (_is_off, _USE_FORMAT),
    "guided_regex": (_is_off, _USE_FORMAT),
    "guided_choice": (_is_off, _USE_FORMAT),
    "guided_grammar": (_is_off, _USE_FORMAT),
    "use_beam_search": (_is_off, "beam search is not built; leave it out"),
    "echo": (_is_off, "repeating the prompt is not built; leave it out"),
    "suffix": (_is_off, "text after the answer is not built; leave it out"),
    "audio": (lambda value: False, "this engine writes text only; leave it out"),
    "modalities": (lambda value: value == ["text"], "this engine writes text only; leave it out"),
    "chat_template": (lambda value: False, "only the model's own chat template is used; leave it out"),
    "chat_template_kwargs": (_is_off, "arguments for the chat template are not built; leave it out"),
    "continue_final_message": (_is_off, "continuing an assistant message is not built; use /v1/completions"),
}
"""Parameter -> is this value the one that asks for nothing, and what to do otherwise."""


def _refuse_unbuilt(fields: Fields) -> None:
    for name in fields.keys() & _UNBUILT.keys():
        value = fields[name]
        asks_nothing, advice = _UNBUILT[name]
        if value is not None and not asks_nothing(value):
            raise unsupported(name, f"'{name}' is {shown(value)}, but in this engine {advice}.")
