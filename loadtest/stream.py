"""Reads one answer, event by event, into a record."""

from __future__ import annotations

from typing import Any

import msgspec

from loadtest.record import Fault, Record
from protocol.openai import Answer, Choice, Usage, decode_answer, decode_usage, is_present
from protocol.sse import EventSplitter, EventTooLarge, event_data
from protocol.timings import Timings

_decode_timings = msgspec.json.Decoder(Timings).decode
_SHOWN = 200


class StreamReader:
    """Bytes go in as they come, with the instant at which they were read."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._splitter = EventSplitter()
        self._is_done = False
        self._is_finished = False

    def feed(self, data: bytes, now_ns: int) -> Fault | None:
        """Takes what was read; the fault that ends the request, if it shows one."""
        try:
            events = self._splitter.feed(data)
        except EventTooLarge as error:
            return Fault("bad_event", str(error))
        return self._read(events, now_ns)

    def end(self, now_ns: int) -> Fault | None:
        """The connection was closed in order; what is wrong with the answer as a whole."""
        if (rest := self._splitter.flush()) and (fault := self._read([rest], now_ns)):
            return fault
        record = self._record
        if not self._is_done:
            record.oddities.add("no_done")
        if not self._is_done and not self._is_finished:
            return Fault("cut_short", f"after {len(record.token_events)} events with tokens")
        return check_tokens(record)

    def _read(self, events: list[bytes], now_ns: int) -> Fault | None:
        for event in events:
            data = event_data(event)
            if not data:
                continue
            if data.strip() == b"[DONE]":
                self._is_done = True
                continue
            try:
                answer = decode_answer(data)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                return Fault("bad_event", f"{error}: {shown(data)}")
            if is_present(answer.error):
                return Fault("error_event", shown(bytes(answer.error)))
            self._take(answer, now_ns)
        return None

    def _take(self, answer: Answer, now_ns: int) -> None:
        record = self._record
        for choice in answer.choices:
            if choice.text or (choice.delta is not None and choice.delta.has_token):
                if not record.first_token_ns:
                    record.first_token_ns = now_ns
                record.last_token_ns = now_ns
                record.token_events.append(now_ns)
                take_text(record, choice)
            if choice.finish_reason:
                self._is_finished = True
                if record.first_token_ns:
                    record.last_token_ns = now_ns
        take_figures(record, answer)


def take_figures(record: Record, answer: Answer) -> None:
    """Usage and the engine's own times, where the answer has them."""
    if is_present(answer.usage):
        try:
            _take_usage(record, decode_usage(answer.usage))
        except msgspec.DecodeError:
            record.oddities.add("no_usage")
    if is_present(answer.timings):
        try:
            record.timings = _decode_timings(answer.timings)
        except msgspec.DecodeError:
            record.timings = None


def take_text(record: Record, choice: Choice) -> None:
    """Keeps what was said until it is known whether usage tells the tokens; tool calls are no text to be counted."""
    if record.text is None:
        return
    said = choice.delta or choice.message
    if said is None:
        pieces: tuple[Any, ...] = (choice.text,)
    elif said.tool_calls or said.function_call:
        pieces = (None,)
    else:
        pieces = tuple(filter(None, (said.reasoning_content or said.reasoning, said.content, said.refusal)))
    if all(isinstance(piece, str) for piece in pieces):
        record.text += pieces
    else:
        record.text = None


def check_tokens(record: Record) -> Fault | None:
    """After the end of a good answer: whether it had tokens, and how they could be counted."""
    events = len(record.token_events)
    if record.usage_tokens is not None:
        record.text = None
    if record.usage_tokens is None:
        record.oddities.add("no_usage")
    elif 0 < events < record.usage_tokens:
        record.oddities.add("several_tokens_in_an_event")
    elif not events and record.usage_tokens:
        record.oddities.add("late_usage_only")
    return None if events or record.usage_tokens else Fault("no_tokens", "neither an event nor the usage has a token")


def readable(text: str) -> str:
    """What aiohttp made of a server's header, where bytes that are no UTF-8 became what nobody can write down."""
    return text.encode("utf-8", "replace").decode()


def shown(data: bytes) -> str:
    """The beginning of what a server said, in one line."""
    text = " ".join(data[: 4 * _SHOWN].decode("utf-8", "replace").split())
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def _take_usage(record: Record, usage: Usage) -> None:
    if usage.prompt_tokens is not None:
        record.prompt_tokens = usage.prompt_tokens
    if usage.prompt_tokens_details is not None:
        record.cached_tokens = usage.prompt_tokens_details.cached_tokens
    if usage.completion_tokens is not None:
        record.usage_tokens = usage.completion_tokens
