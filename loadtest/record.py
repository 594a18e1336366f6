"""What one request of a load test was, and when: every instant is monotonic ns, 0 where it was not reached."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from protocol.timings import Timings

if TYPE_CHECKING:
    from loadtest.server_side import ServerSide

ERRORS = {
    "unreachable": "no connection to the server",
    "unauthorized": "the key was refused (401, 403)",
    "not_found": "the model or the base_url is not known there (404)",
    "refused": "the server had no room or a limit was reached (429)",
    "bad_request": "the server refused the request (another 4xx)",
    "server_error": "the server failed (5xx)",
    "timeout": "not complete within api.timeout_seconds",
    "broken_stream": "the connection was lost before the answer was complete",
    "not_sse": "the answer is not an event stream: a proxy's page, or a server that does not stream",
    "bad_event": "an event of the stream can't be read",
    "error_event": "the server told an error inside the stream",
    "no_tokens": "the answer ended without a token",
    "cut_short": "the stream ended without finish_reason and without [DONE]",
    "unsent": "too many requests were waiting for room to be sent",
    "unfinished": "still running when the run ended or was stopped",
}
"""Every kind of failure, with what it means."""

ODDITIES = {
    "no_usage": "no usage in the answer: tokens are counted by tokenizer or by events, token_counts says which",
    "no_done": "the stream ended without [DONE]",
    "several_tokens_in_an_event": "fewer events than tokens: gaps are between events, not between tokens",
    "late_usage_only": "usage says tokens that no event showed",
}
"""What is strange but harms no measurement that is reported."""


@dataclass(frozen=True)
class Fault:
    """Why a request failed."""

    kind: str
    detail: str
    may_retry: bool = False
    retry_after_s: float = 0.0


@dataclass(slots=True)
class Record:
    """One request."""

    scheduled_ns: int
    group: str = ""
    asked_prompt_tokens: int = 0
    sent_ns: int = 0
    """The first try was handed to the transport."""
    first_byte_ns: int = 0
    """The status line of the answer was read."""
    first_token_ns: int = 0
    last_token_ns: int = 0
    """The last token or the finish_reason, whichever came later."""
    end_ns: int = 0
    retries: int = 0
    fault: Fault | None = None
    retried_for: list[str] = field(default_factory=list)
    token_events: array[int] = field(default_factory=lambda: array("q"))
    """When each event with a token was read."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    usage_tokens: int | None = None
    """Output tokens by the server's usage, less reasoning that was not streamed."""
    counted_tokens: int | None = None
    """Output tokens by a tokenizer, where usage did not say."""
    counted_by: str | None = None
    text: list[str] | None = field(default_factory=list)
    """What the answer said, for the tokenizer; None: usage told, or it was no plain text."""
    oddities: set[str] = field(default_factory=set)
    timings: Timings | None = None
    """What an engine told of the request in band."""
    request_id: str | None = None
    """As `tokenline why` takes it, where there is a Tokenline gateway; else what the server calls the request."""
    gateway_id: str | None = None
    """The id that a Tokenline gateway gave it."""
    server: ServerSide | None = None
    """The gateway's own account, once it was joined."""

    @property
    def output_tokens(self) -> int:
        """By usage, else by tokenizer, else by events."""
        if self.usage_tokens is not None:
            return self.usage_tokens
        return len(self.token_events) if self.counted_tokens is None else self.counted_tokens

    @property
    def is_good(self) -> bool:
        """Complete, and ended without a fault."""
        return self.end_ns > 0 and self.fault is None

    @property
    def ttft_ms(self) -> float | None:
        """From the instant it was due to its first token: what a user who came then has waited."""
        return (self.first_token_ns - self.scheduled_ns) / 1e6 if self.first_token_ns else None

    @property
    def ttft_from_sent_ms(self) -> float | None:
        """The same without the time that the client itself kept it waiting."""
        return (self.first_token_ns - self.sent_ns) / 1e6 if self.first_token_ns else None

    @property
    def tpot_ms(self) -> float | None:
        """(last token - first token) / (output tokens - 1)."""
        if not self.first_token_ns or self.output_tokens < 2 or self.last_token_ns <= self.first_token_ns:
            return None
        return (self.last_token_ns - self.first_token_ns) / 1e6 / (self.output_tokens - 1)

    @property
    def e2e_ms(self) -> float:
        """From the instant it was due to its end."""
        return (self.end_ns - self.scheduled_ns) / 1e6

    @property
    def e2e_from_sent_ms(self) -> float | None:
        return (self.end_ns - self.sent_ns) / 1e6 if self.sent_ns else None
