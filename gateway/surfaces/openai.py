"""Requests as they came in, and OpenAI's chat completions and completions among them.

A request is forwarded as the bytes that came, but for the model's upstream name and `stream_options.include_usage`.
An answer is forwarded as it comes, but for `timings` (the engine's report) and a usage event that nobody asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from protocol.errors import ApiError
from protocol.openai import Asked, Request, decode_asked, decode_fields, decode_request, encode_fields

MAX_MODEL_NAME = 256
MAX_CHOICES = 128

Asks = TypeVar("Asks", Request, Asked)


class ParsedRequest(msgspec.Struct, frozen=True):
    """A request that has been read but not judged: the upstream says what it thinks of the rest."""

    body: bytes
    fields: dict[str, msgspec.Raw]
    model: str
    stream: bool
    wants_usage: bool
    """The client asked for the usage event, or the surface has none."""
    choices: int
    query: str = ""
    """With its question mark, where upstreams get one."""
    made: dict[str, bytes] = {}
    """Bodies for upstreams by model name: made once, while routing."""
    translated: dict[str, bytes] = {}
    """The same for upstreams that speak another surface."""

    @property
    def opening(self) -> bytes:
        """What the prompt begins with, as it was sent: requests that share it can share a KV cache."""
        names = ("instructions", "system", "messages", "input", "prompt")
        return b"".join(bytes(self.fields[name]) for name in names if name in self.fields)

    def body_for(self, model: str) -> bytes:
        """The body for one upstream: the very bytes that came unless something had to change."""
        body = self.made.get(model)
        if body is None:
            body = self.made[model] = self._make(model)
        return body

    def _make(self, model: str) -> bytes:
        changed: dict[str, msgspec.Raw | bytes] = {}
        if model != self.model:
            changed["model"] = msgspec.json.encode(model)
        if self.stream and not self.wants_usage:
            changed["stream_options"] = _with_usage(self.fields.get("stream_options"))
        if not changed:
            return self.body
        fields: dict[str, msgspec.Raw | bytes] = {**self.fields, **changed}
        return encode_fields(fields)


def parse_chat(body: bytes, _query: bytes = b"") -> ParsedRequest:
    """Raises ApiError 400 that says where the JSON breaks or which field has the wrong type."""
    request, fields = _read(body, decode_request)
    _check_model(request.model)
    choices = 1 if request.n is None else request.n
    if choices not in range(1, MAX_CHOICES + 1):
        raise ApiError(400, "invalid_request", f"'n' must be a whole number from 1 to {MAX_CHOICES}.", param="n")
    return ParsedRequest(
        body=body,
        fields=fields,
        model=request.model,
        stream=bool(request.stream),
        wants_usage=bool(request.stream_options and request.stream_options.include_usage),
        choices=int(choices),
    )


def parse_other(body: bytes, query: bytes = b"") -> ParsedRequest:
    """The same for surfaces of which the gateway reads only the model and whether to stream."""
    request, fields = _read(body, decode_asked)
    _check_model(request.model)
    return ParsedRequest(
        body=body,
        fields=fields,
        model=request.model,
        stream=bool(request.stream),
        wants_usage=True,
        choices=1,
        query="?beta=true" if b"beta=true" in query.split(b"&") else "",
    )


def _read(body: bytes, decode: Callable[[bytes], Asks]) -> tuple[Asks, dict[str, msgspec.Raw]]:
    try:
        if not body.isascii():
            body.decode()  # values that stay raw would pass on broken UTF-8
        return decode(body), decode_fields(body)
    except msgspec.ValidationError as error:
        raise wrong_field(error) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, "invalid_json", f"The body is not valid JSON: {error}") from error


def _check_model(model: str) -> None:
    if not model or len(model) > MAX_MODEL_NAME:
        raise ApiError(400, "invalid_request", f"'model' must be 1 to {MAX_MODEL_NAME} characters long.", param="model")


def wrong_field(error: msgspec.ValidationError) -> ApiError:
    """msgspec says "Expected `int`, got `str` - at `$.n`": the path names the field."""
    text = str(error)
    param = text.rpartition("`$.")[2].rstrip("`") if "`$." in text else None
    if "missing required field" in text:
        param = (f"{param}." if param else "") + text.split("`")[1]
        return ApiError(400, "invalid_request", f"The field '{param}' is missing.", param=param)
    if param is None:
        return ApiError(400, "invalid_json", f"The body must be a JSON object: {text}.")
    return ApiError(400, "invalid_request", f"The field '{param}' is wrong: {text.split(' - at')[0]}.", param=param)


def _with_usage(options: msgspec.Raw | None) -> bytes:
    if options is None or bytes(options) == b"null":
        return b'{"include_usage":true}'
    fields: dict[str, msgspec.Raw | bytes] = {**decode_fields(options), "include_usage": b"true"}
    return encode_fields(fields)


def without_timings(data: bytes) -> bytes:
    """An answer's JSON without the engine's report."""
    fields: dict[str, msgspec.Raw | bytes] = {**decode_fields(data)}
    del fields["timings"]
    return encode_fields(fields)
