"""Anthropic's Messages API with an upstream that speaks it: bytes pass through, marks and counts are read."""

from __future__ import annotations

import msgspec

from gateway.surfaces.openai import ParsedRequest
from gateway.surfaces.stream import EventRelay, count, mark_token
from gateway.surfaces.surface import Native
from protocol.anthropic import Delta, Event, decode_event, decode_message, decode_message_usage
from protocol.openai import is_present
from tracing.ledger import Ledger, Usage


class MessagesRelay(EventRelay):
    """Passes the events on. `message_start` is an event and no token; the counts of several events make one usage."""

    def _pass_on(self, event: bytes, now: int) -> bytes:
        data = self._data(event, now)
        if data is None:
            return event if self._ledger.first_event else b""
        try:
            found = decode_event(data)
        except (msgspec.MsgspecError, RecursionError):
            return event
        self._stamp(found, now)
        if found.type == "error":
            self.error = data
        elif found.type == "message_stop":
            self.done = True
        return event

    def _stamp(self, event: Event, now: int) -> None:
        ledger = self._ledger
        if event.type == "content_block_delta" and event.delta is not None:
            _mark(ledger, event.delta, now)
        elif event.type == "content_block_start" and event.content_block is not None:
            _mark(ledger, event.content_block, now)
        elif event.type == "message_start" and event.message is not None:
            read_message_usage(ledger, event.message.usage)
        elif event.type == "message_delta":
            read_message_usage(ledger, event.usage)
            if event.delta is not None and event.delta.stop_reason:
                ledger.finish_reason = event.delta.stop_reason
                ledger.last_token = now


class MessagesNative(Native):
    """Messages, passed through."""

    def stream(self, ledger: Ledger, request: ParsedRequest, *, keep_timings: bool) -> EventRelay:
        return MessagesRelay(ledger)

    def whole(self, ledger: Ledger, request: ParsedRequest, body: bytes, *, keep_timings: bool) -> bytes:
        try:
            found = decode_message(body)
        except (msgspec.ValidationError, RecursionError):
            return body
        ledger.finish_reason = found.stop_reason or ledger.finish_reason
        read_message_usage(ledger, found.usage)
        return body


def _mark(ledger: Ledger, delta: Delta, now: int) -> None:
    visible, reasoning = bool(delta.text), bool(delta.thinking)
    # The start of a tool call carries its name, which the model wrote.
    other = bool(delta.partial_json) or (isinstance(delta.type, str) and delta.type.endswith("tool_use"))
    if visible or reasoning or other:
        mark_token(ledger, now, visible=visible, reasoning=reasoning)


def read_message_usage(ledger: Ledger, raw: msgspec.Raw) -> None:
    """Adds an event's counts to the ledger's. Anthropic's input_tokens are those that no cache had."""
    if not is_present(raw):
        return
    try:
        found = decode_message_usage(raw)
    except msgspec.MsgspecError:
        return
    before = ledger.usage
    fresh, read = count(found.input_tokens), count(found.cache_read_input_tokens)
    written = count(found.cache_creation_input_tokens)
    ledger.usage = Usage(
        input_tokens=before.input_tokens if fresh is None else fresh + (read or 0) + (written or 0),
        output_tokens=before.output_tokens if found.output_tokens is None else count(found.output_tokens),
        cached_tokens=before.cached_tokens if read is None else read,
        source="usage",
    )
