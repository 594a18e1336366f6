"""What an error looks like on each surface, before an answer began and after."""

from __future__ import annotations

from typing import Protocol

import msgspec

from protocol.errors import ApiError


class ErrorShape(Protocol):
    """How a surface tells an error."""

    id_header: bytes | None
    """A header of the surface's own that repeats the request id."""

    def body(self, error: ApiError, request_id: str) -> bytes:
        """A whole answer's JSON."""

    def event(self, error: ApiError, request_id: str) -> bytes:
        """The one event that ends a stream."""

    def fits(self, body: bytes) -> bool:
        """Whether an upstream's JSON error can go to the client as it is."""


class OpenAIErrors:
    """`{"error": {...}}`, in a stream as a `data:` event."""

    id_header: bytes | None = None

    def body(self, error: ApiError, request_id: str) -> bytes:
        return error.openai_body(request_id)

    def event(self, error: ApiError, request_id: str) -> bytes:
        return error.openai_event(request_id)

    def fits(self, _body: bytes) -> bool:
        return True


class AnthropicErrors:
    """`{"type": "error", "error": {...}, "request_id": ...}`, in a stream as an `error` event."""

    id_header: bytes | None = b"request-id"

    def body(self, error: ApiError, request_id: str) -> bytes:
        return error.anthropic_body(request_id)

    def event(self, error: ApiError, request_id: str) -> bytes:
        return error.anthropic_event(request_id)

    def fits(self, body: bytes) -> bool:
        try:
            return _decode_typed(body).type == "error"
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return False


class _Typed(msgspec.Struct):
    type: str = ""


_decode_typed = msgspec.json.Decoder(_Typed).decode

OPENAI_ERRORS: ErrorShape = OpenAIErrors()
ANTHROPIC_ERRORS: ErrorShape = AnthropicErrors()


def shape_for(headers: dict[bytes, bytes]) -> ErrorShape:
    """The shape that a client reads where the path alone does not tell."""
    return ANTHROPIC_ERRORS if b"anthropic-version" in headers else OPENAI_ERRORS
