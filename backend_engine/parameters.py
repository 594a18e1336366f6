"""Sampling parameters of a request: types and ranges of those that are built in, a refusal for those that are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from protocol.errors import ApiError

MAX_STOPS = 16
MAX_STOP_LETTERS = 256
_LARGEST = 2**31 - 1
_SEEDS = (-(2**63), 2**63 - 1)

Fields = dict[str, Any]


class Parameters(msgspec.Struct, frozen=True):
    """What the client asked for, checked but not yet cut to what fits the model."""

    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    stops: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    is_stream: bool
    wants_usage: bool


def invalid(param: str, message: str) -> ApiError:
    """400 for a value of the wrong type or range."""
    return ApiError(400, "invalid_request", message, param=param)


def unsupported(param: str, message: str) -> ApiError:
    """400 for something that we know and have not built: never silently ignored."""
    return ApiError(400, "unsupported_parameter", message, param=param)


def parse_parameters(fields: Fields) -> Parameters:
    """Raises ApiError 400 that names the parameter, its value and what is possible."""
    _refuse_unbuilt(fields)
    is_stream = _flag(fields, "stream")
    asked = [_integer(fields, name, 1, _LARGEST) for name in ("max_completion_tokens", "max_tokens")]
    return Parameters(
        max_tokens=next((limit for limit in asked if limit is not None), None),
        temperature=_number(fields, "temperature", 1.0, 0.0, 2.0),
        top_p=_share(fields, "top_p"),
        top_k=max(0, _integer(fields, "top_k", -1, _LARGEST) or 0),
        seed=_integer(fields, "seed", *_SEEDS),
        stops=_stops(fields.get("stop")),
        stop_token_ids=_token_ids(fields),
        ignore_eos=_flag(fields, "ignore_eos"),
        is_stream=is_stream,
        wants_usage=_wants_usage(fields.get("stream_options"), is_stream=is_stream),
    )


def _shown(value: Any) -> str:
    """A value as JSON, short enough for a message."""
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 60 else text[:57] + "..."


def _integer(fields: Fields, name: str, low: int, high: int) -> int | None:
    value = fields.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise invalid(name, f"'{name}' must be a whole number, not {_shown(value)}.")
    if not low <= value <= high:
        bounds = f"at least {low}" if value < low else f"at most {high}"
        raise invalid(name, f"'{name}' must be {bounds}, not {_shown(value)}.")
    return value


def _number(fields: Fields, name: str, default: float, low: float, high: float) -> float:
    value = fields.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise invalid(name, f"'{name}' must be a number, not {_shown(value)}.")
    if not low <= value <= high:
        raise invalid(name, f"'{name}' must be from {low:g} to {high:g}, not {_shown(value)}.")
    return float(value)


def _share(fields: Fields, name: str) -> float:
    share = _number(fields, name, 1.0, 0.0, 1.0)
    if share == 0:
        raise invalid(name, f"'{name}' must be above 0 and at most 1, not 0.")
    return share


def _flag(fields: Fields, name: str) -> bool:
    value = fields.get(name)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise invalid(name, f"'{name}' must be true or false, not {_shown(value)}.")


def _stops(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise invalid("stop", f"'stop' must be a string or a list of strings, not {_shown(value)}.")
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
        raise invalid("stop_token_ids", f"'stop_token_ids' must be a list of token ids, not {_shown(value)}.")
    return tuple(value)


def _wants_usage(options: Any, *, is_stream: bool) -> bool:
    if options is None:
        return False
    if not isinstance(options, dict):
        raise invalid("stream_options", f"'stream_options' must be an object, not {_shown(options)}.")
    if not is_stream:
        raise invalid("stream_options", "'stream_options' is allowed only with 'stream': true.")
    return _flag(options, "include_usage")


def _is_text_format(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type") == "text"


def _is_one(value: Any) -> bool:
    return type(value) is int and value == 1


def _is_zero(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and value == 0


def _is_off(value: Any) -> bool:
    return value is False or value in ([], {}, "none", "auto", "")


_UNBUILT: dict[str, tuple[Callable[[Any], bool], str]] = {
    "n": (_is_one, "only one answer per request ('n': 1) is built; send the request several times"),
    "best_of": (_is_one, "only one answer per request is built"),
    "logprobs": (_is_off, "log probabilities are not built; leave it out"),
    "top_logprobs": (_is_zero, "log probabilities are not built; leave it out"),
    "prompt_logprobs": (_is_zero, "log probabilities are not built; leave it out"),
    "tools": (_is_off, "tool calls are not built; route them to another upstream"),
    "tool_choice": (_is_off, "tool calls are not built; route them to another upstream"),
    "functions": (_is_off, "function calls are not built; route them to another upstream"),
    "function_call": (_is_off, "function calls are not built; route them to another upstream"),
    "response_format": (_is_text_format, "only {'type': 'text'} is built; structured output needs another upstream"),
    "structured_outputs": (_is_off, "structured output is not built; route it to another upstream"),
    "guided_json": (_is_off, "structured output is not built; route it to another upstream"),
    "guided_regex": (_is_off, "structured output is not built; route it to another upstream"),
    "guided_choice": (_is_off, "structured output is not built; route it to another upstream"),
    "guided_grammar": (_is_off, "structured output is not built; route it to another upstream"),
    "presence_penalty": (_is_zero, "penalties are not built; leave it out or send 0"),
    "frequency_penalty": (_is_zero, "penalties are not built; leave it out or send 0"),
    "repetition_penalty": (lambda value: _is_zero(value - 1) if type(value) in (int, float) else False,
                           "penalties are not built; leave it out or send 1"),
    "min_p": (_is_zero, "min_p is not built; leave it out or send 0"),
    "min_tokens": (_is_zero, "a smallest length is not built; leave it out"),
    "logit_bias": (_is_off, "logit bias is not built; leave it out"),
    "use_beam_search": (_is_off, "beam search is not built; leave it out"),
    "echo": (_is_off, "repeating the prompt is not built; leave it out"),
    "suffix": (_is_off, "text after the answer is not built; leave it out"),
    "audio": (lambda value: False, "this engine writes text only; leave it out"),
    "modalities": (lambda value: value == ["text"], "this engine writes text only; leave it out"),
    "chat_template": (lambda value: False, "only the model's own chat template is used; leave it out"),
    "chat_template_kwargs": (_is_off, "arguments for the chat template are not built; leave it out"),
    "continue_final_message": (_is_off, "continuing an assistant message is not built; use /v1/completions"),
}  # fmt: skip
"""Parameter -> is this value the one that asks for nothing, and what to do otherwise."""


def _refuse_unbuilt(fields: Fields) -> None:
    for name in fields.keys() & _UNBUILT.keys():
        value = fields[name]
        asks_nothing, advice = _UNBUILT[name]
        if value is not None and not asks_nothing(value):
            raise unsupported(name, f"'{name}' is {_shown(value)}, but in this engine {advice}.")
