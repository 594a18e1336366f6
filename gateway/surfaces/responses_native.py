"""OpenAI's Responses API with an upstream that speaks it: bytes pass through, marks and counts are read."""

from __future__ import annotations

import msgspec

from gateway.surfaces.openai import ParsedRequest
from gateway.surfaces.responses_errors import FailedResponse
from gateway.surfaces.shapes import ErrorShape
from gateway.surfaces.stream import EventRelay, count, mark_token
from gateway.surfaces.surface import Native
from protocol.openai import is_present
from protocol.responses import Answer, decode_event, decode_response, decode_response_usage
from tracing.ledger import Ledger, Usage

VISIBLE = frozenset({"response.output_text.delta", "response.refusal.delta"})
REASONING = frozenset({"response.reasoning_text.delta", "response.reasoning_summary_text.delta"})
OTHER_TOKENS = frozenset(
    {
        "response.function_call_arguments.delta",
        "response.custom_tool_call_input.delta",
        "response.mcp_call_arguments.delta",
        "response.code_interpreter_call_code.delta",
    }
)
ENDS = frozenset({"response.completed", "response.incomplete", "response.failed"})


class ResponsesRelay(EventRelay):
    """Passes the events on. `response.created` is an event and no token."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._failed = FailedResponse()

    def shape(self, surface: ErrorShape) -> ErrorShape:
        return self._failed

    def _pass_on(self, event: bytes, now: int) -> bytes:
        ledger = self._ledger
        data = self._data(event, now)
        if data is None:
            return event if ledger.first_event else b""
        try:
            found = decode_event(data)
        except (msgspec.MsgspecError, RecursionError):
            return event
        kind = found.type
        self._failed.sequence_number = (found.sequence_number or self._failed.sequence_number) + 1
        if kind in VISIBLE or kind in REASONING or kind in OTHER_TOKENS:
            if found.delta:
                mark_token(ledger, now, visible=kind in VISIBLE, reasoning=kind in REASONING)
        elif kind == "response.output_item.added":
            # A call's item carries its name, which the model wrote.
            if found.item is not None and found.item.type.endswith("_call"):
                mark_token(ledger, now, visible=False, reasoning=False)
        elif kind == "response.created":
            self._failed.response = found.response
        elif kind in ENDS:
            self._end(found.response, kind, now)
        elif kind == "error":
            self.error = data
        return event

    def _end(self, response: msgspec.Raw, kind: str, now: int) -> None:
        self.done = True
        self._ledger.last_token = now
        try:
            answer = decode_response(response)
        except (msgspec.MsgspecError, RecursionError):
            return
        read_response(self._ledger, answer)
        if kind == "response.failed":
            self.error = b'{"error":' + (bytes(answer.error) or b"null") + b"}"


class ResponsesNative(Native):
    """Responses, passed through."""

    def stream(self, ledger: Ledger, request: ParsedRequest, *, keep_timings: bool) -> EventRelay:
        return ResponsesRelay(ledger)

    def whole(self, ledger: Ledger, request: ParsedRequest, body: bytes, *, keep_timings: bool) -> bytes:
        try:
            found = decode_response(body)
        except (msgspec.ValidationError, RecursionError):
            return body
        read_response(ledger, found)
        return body


def read_response(ledger: Ledger, answer: Answer) -> None:
    """Why it ended and how many tokens it took."""
    reason = answer.incomplete_details.reason if answer.incomplete_details else None
    ledger.finish_reason = reason or answer.status or ledger.finish_reason
    if not is_present(answer.usage):
        return
    try:
        found = decode_response_usage(answer.usage)
    except msgspec.MsgspecError:
        return
    given, made = found.input_tokens_details, found.output_tokens_details
    ledger.usage = Usage(
        input_tokens=count(found.input_tokens),
        output_tokens=count(found.output_tokens),
        cached_tokens=count(given.cached_tokens) if given else None,
        reasoning_tokens=count(made.reasoning_tokens) if made else None,
        source="usage",
    )
