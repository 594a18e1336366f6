"""A stream on its way through: what each event means for the ledger, and which bytes of it the client gets.

Marks are stamped on the upstream's events before anything is changed. Exactly one usage event reaches a client that
asked for it, and none a client that did not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import msgspec

from gateway.surfaces.openai import without_timings
from gateway.surfaces.shapes import ErrorShape
from protocol.errors import ApiError
from protocol.openai import Answer, decode_answer, decode_usage, is_present
from protocol.sse import EventSplitter, EventTooLarge, event_data
from protocol.timings import Timings, plausible
from tracing.clock import host_identity
from tracing.ledger import Ledger, Usage

_decode_timings = msgspec.json.Decoder(Timings).decode
DONE = b"[DONE]"
_BOM = b"\xef\xbb\xbf"
MAX_TOKENS = 2**40


class EventRelay(ABC):
    """Takes the upstream's bytes and gives the client's. One per attempt that began to stream."""

    retells_errors = False
    """The upstream's error event is not among the bytes; the caller tells it in the surface's shape."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._splitter = EventSplitter()
        self.done = False
        """The event came that completes the answer."""
        self.error: bytes | None = None
        """The upstream's own error event, or its failed answer."""

    def feed(self, data: bytes, now: int) -> bytes:
        """The client's bytes for what just arrived, read at `now` (monotonic ns). Raises ApiError 502."""
        try:
            events = self._splitter.feed(data)
        except EventTooLarge as error:
            raise ApiError(502, "upstream_error", f"The upstream sent {error}.") from error
        return b"".join([self._pass_on(event, now) for event in events])

    def end(self, now: int) -> bytes:
        """The client's bytes once the upstream has ended: a last event without its blank line, what was held back."""
        rest = self._splitter.flush()
        out = self._pass_on(rest.rstrip(b"\r\n") + b"\n\n", now) if rest.strip() else b""
        return out + self._release()

    def shape(self, surface: ErrorShape) -> ErrorShape:
        """How an error is told from here on; `surface` knows how it is told before an answer began."""
        return surface

    def _data(self, event: bytes, now: int) -> bytes | None:
        """The event's data, None for a comment; stamps the first event."""
        ledger = self._ledger
        data = event_data(event if ledger.first_event else event.removeprefix(_BOM))
        if data is not None and not ledger.first_event:
            ledger.first_event = now
        return data

    @abstractmethod
    def _pass_on(self, event: bytes, now: int) -> bytes:
        """The client's bytes for one event."""

    def _release(self) -> bytes:
        """What was held back until the end."""
        return b""


class ChatReader(EventRelay):
    """Reads the events of chat and text completions."""

    def _stamp(self, answer: Answer, now: int) -> None:
        ledger = self._ledger
        has_token = finished = False
        for choice in answer.choices:
            delta = choice.delta
            if delta is not None and not ledger.first_reasoning and delta.is_reasoning:
                ledger.first_reasoning = now
            visible = bool(choice.text) or (delta is not None and delta.is_visible)
            if visible and not ledger.first_visible:
                ledger.first_visible = now
            has_token = has_token or visible or (delta is not None and delta.has_token)
            if choice.finish_reason:
                finished = True
                ledger.finish_reason = choice.finish_reason
        if has_token:
            ledger.token_events += 1
            if not ledger.first_token:
                ledger.first_token = now
        if has_token or finished:
            ledger.last_token = now
        self.done = self.done or finished


class StreamRelay(ChatReader):
    """Chat and text completions as they came."""

    def __init__(self, ledger: Ledger, *, wants_usage: bool, keep_timings: bool) -> None:
        super().__init__(ledger)
        self._wants_usage = wants_usage
        self._keep_timings = keep_timings
        self._held_usage = b""

    def _pass_on(self, event: bytes, now: int) -> bytes:
        ledger = self._ledger
        data = self._data(event, now)
        if data is None:
            # A comment is no event: before the first event nothing goes out, so that a failure can still be retried.
            return event if ledger.first_event else b""
        if data == DONE:
            self.done = True
            return self._release() + event
        try:
            answer = decode_answer(data)
        except (msgspec.MsgspecError, RecursionError):
            return event
        self._stamp(answer, now)
        if not (answer.error or answer.usage or answer.timings):
            return event
        if is_present(answer.error) and not answer.choices:
            self.error = data
        if is_present(answer.usage) and read_usage(ledger, answer.usage) and not answer.choices:
            self._held_usage = event
            return b""
        if is_present(answer.timings):
            read_timings(ledger, answer.timings, now)
            if not self._keep_timings:
                return b"data: " + without_timings(data) + b"\n\n"
        return event

    def _release(self) -> bytes:
        """The one usage event, where the client asked for it."""
        held, self._held_usage = self._held_usage, b""
        return held if self._wants_usage else b""


def mark_token(ledger: Ledger, now: int, *, visible: bool, reasoning: bool) -> None:
    """An event came that carries what the model wrote."""
    ledger.token_events += 1
    ledger.last_token = now
    if not ledger.first_token:
        ledger.first_token = now
    if reasoning and not ledger.first_reasoning:
        ledger.first_reasoning = now
    if visible and not ledger.first_visible:
        ledger.first_visible = now


def forget_answer(ledger: Ledger) -> None:
    """A new attempt begins: what an earlier one said before it failed is no part of the answer, its marks included."""
    ledger.first_event = ledger.first_token = ledger.first_reasoning = ledger.first_visible = 0
    ledger.last_token = ledger.upstream_end = ledger.token_events = 0
    ledger.usage, ledger.timings, ledger.finish_reason = Usage(), None, None


def read_usage(ledger: Ledger, raw: msgspec.Raw) -> bool:
    """Writes an upstream's token counts into the ledger; False where they can't be read."""
    try:
        usage = decode_usage(raw)
    except msgspec.MsgspecError:
        return False
    prompt, completion = usage.prompt_tokens_details, usage.completion_tokens_details
    ledger.usage = Usage(
        input_tokens=count(usage.prompt_tokens),
        output_tokens=count(usage.completion_tokens),
        cached_tokens=count(prompt.cached_tokens) if prompt else None,
        reasoning_tokens=count(completion.reasoning_tokens) if completion else None,
        source="usage",
    )
    return True


def count(tokens: int | None) -> int | None:
    """A number of tokens that can be one; anything else is unknown."""
    return tokens if tokens is not None and 0 <= tokens <= MAX_TOKENS else None


def read_timings(ledger: Ledger, raw: msgspec.Raw, now: int) -> None:
    """Keeps the engine's report, read at `now`; the last one is the fullest. What can't be true is left alone."""
    try:
        timings = plausible(_decode_timings(raw), host_identity(), ledger.attempts[-1].connect_start, now)
    except msgspec.MsgspecError:
        return
    if timings is not None:
        ledger.timings = timings


def count_by_events(ledger: Ledger) -> None:
    """Without a usage count, the token events are the count, and the ledger says so."""
    if ledger.usage.output_tokens is None and ledger.token_events:
        ledger.usage.output_tokens = ledger.token_events
        ledger.usage.source = "events"
