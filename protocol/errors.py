"""Errors as clients see them: one exception type, its OpenAI and Anthropic shapes, its stream event."""

from __future__ import annotations

import msgspec

ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
}

ANTHROPIC_TYPES = {413: "request_too_large", 503: "overloaded_error", 504: "timeout_error", 529: "overloaded_error"}
"""Where Anthropic's names differ from the above."""


class ApiError(Exception):
    """A refusal or failure that is told to the client.

    `message` says what was seen and what to do; it never holds a secret, a path of this machine or a stack trace.
    `code` is one of the codes of docs/errors.md, `param` the offending field, `retry_after` seconds.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after: float | None = None,
        extra_headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.retry_after = retry_after
        self.extra_headers = extra_headers

    @property
    def type(self) -> str:
        """The error class in OpenAI's terms."""
        return ERROR_TYPES.get(self.status, "api_error")

    def openai_body(self, request_id: str | None = None) -> bytes:
        """`{"error": {...}}` as OpenAI's SDKs read it."""
        return msgspec.json.encode(
            {
                "error": {
                    "message": self.message,
                    "type": self.type,
                    "code": self.code,
                    "param": self.param,
                    "request_id": request_id,
                }
            }
        )

    def openai_event(self, request_id: str | None = None) -> bytes:
        """The same as one `data:` event, for a stream that has begun."""
        return b"data: " + self.openai_body(request_id) + b"\n\n"

    def anthropic_body(self, request_id: str | None = None) -> bytes:
        """`{"type": "error", "error": {...}}` as Anthropic's SDKs read it."""
        return msgspec.json.encode(
            {
                "type": "error",
                "error": {"type": ANTHROPIC_TYPES.get(self.status, self.type), "message": self.message},
                "request_id": request_id,
            }
        )

    def anthropic_event(self, request_id: str | None = None) -> bytes:
        """The same as one `error` event, for a stream that has begun."""
        return b"event: error\ndata: " + self.anthropic_body(request_id) + b"\n\n"

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers that belong to this error (Retry-After, WWW-Authenticate and what its raiser added)."""
        found = [(name.encode(), value.encode("latin-1", "replace")) for name, value in self.extra_headers]
        if self.retry_after is not None:
            found.append((b"retry-after", str(max(1, round(self.retry_after))).encode()))
        if self.status == 401:
            found.append((b"www-authenticate", b"Bearer"))
        return found
