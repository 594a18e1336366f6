"""Errors of the Responses API: OpenAI's shape before an answer began, `response.failed` after."""

from __future__ import annotations

import msgspec

from gateway.surfaces.shapes import OpenAIErrors
from protocol.errors import ApiError
from protocol.openai import decode_fields, encode_fields

KNOWN_CODES = frozenset({"rate_limit_exceeded", "context_length_exceeded", "insufficient_quota", "invalid_prompt"})
"""Codes by which clients decide whether to try again; anything else of ours is a server_error, which they try again."""


def failure(error: ApiError) -> dict[str, str]:
    """`response.error`."""
    if error.code in KNOWN_CODES:
        code = error.code
    elif error.status == 429:
        code = "rate_limit_exceeded"
    else:
        code = "invalid_prompt" if error.status < 500 else "server_error"
    return {"code": code, "message": error.message}


def sse(kind: str, fields: dict[str, object]) -> bytes:
    """An event whose data repeats its name."""
    data = msgspec.json.encode({"type": kind, **fields})
    return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


class FailedResponse(OpenAIErrors):
    """The last event of a response that had begun: its own object, failed."""

    def __init__(self) -> None:
        self.response: msgspec.Raw | bytes = b""
        """As `response.created` had it; empty: none came yet."""
        self.sequence_number = 0
        """Of the next event."""

    def event(self, error: ApiError, request_id: str) -> bytes:
        try:
            response: dict[str, msgspec.Raw | bytes] = {**decode_fields(self.response)} if self.response else {}
        except msgspec.MsgspecError:
            response = {}
        if not response:
            response = {"id": msgspec.json.encode(f"resp_{request_id}"), "object": b'"response"', "output": b"[]"}
        response |= {"status": b'"failed"', "error": msgspec.json.encode(failure(error))}
        whole = msgspec.Raw(encode_fields(response))
        return sse("response.failed", {"sequence_number": self.sequence_number, "response": whole})
