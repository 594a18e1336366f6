"""Counting a prompt's tokens: natively, or by an upstream's /tokenize."""

from __future__ import annotations

import msgspec

from gateway.surfaces.messages_request import count_to_tokenize
from gateway.surfaces.openai import ParsedRequest
from gateway.surfaces.stream import EventRelay, StreamRelay
from gateway.surfaces.surface import Dialect
from protocol.errors import ApiError
from tracing.ledger import Ledger

TOKENIZE_PATH = "/tokenize"


class _Counted(msgspec.Struct):
    count: int


_decode_counted = msgspec.json.Decoder(_Counted).decode


class CountByTokenize(Dialect):
    """`POST /messages/count_tokens` by way of vLLM's `/tokenize`, which our engine has too."""

    at_root = True

    def path(self, request: ParsedRequest) -> str:
        return TOKENIZE_PATH

    def body(self, request: ParsedRequest, model: str) -> bytes:
        made = request.translated.get(model)
        if made is None:
            made = msgspec.json.encode({"model": model, **count_to_tokenize(request)})
            request.translated[model] = made
        return made

    def stream(self, ledger: Ledger, request: ParsedRequest, *, keep_timings: bool) -> EventRelay:
        return StreamRelay(ledger, wants_usage=True, keep_timings=keep_timings)

    def whole(self, ledger: Ledger, request: ParsedRequest, body: bytes, *, keep_timings: bool) -> bytes:
        try:
            count = _decode_counted(body).count
        except msgspec.ValidationError as error:
            raise ApiError(502, "upstream_error", "The upstream's /tokenize answered without a count.") from error
        return msgspec.json.encode({"input_tokens": count})
