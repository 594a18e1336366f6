"""Server-sent events, incrementally (https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream).

Bytes may be cut anywhere: inside a UTF-8 character, between CR and LF, several events in one read. Events come out as
the bytes that came in, so that a relay forwards them unchanged.
"""

from __future__ import annotations

import re

MAX_EVENT_BYTES = 16 * 2**20

_BLANK_LINE = re.compile(rb"\r\n\r\n|\r\n\r(?!\n)|\r\n\n|\n\r\n|\n\r(?!\n)|\n\n|\r\r\n|\r\r(?!\n)")
"""End of an event: two line ends, each of LF, CRLF or CR (a final CR counts only once the next byte is known)."""


class EventTooLarge(ValueError):
    """One event is longer than MAX_EVENT_BYTES: the stream is not what it claims to be."""


class EventSplitter:
    """Gives whole events, terminator included, as soon as their last byte came."""

    __slots__ = ("_buffer", "_saw_cr", "_scanned")

    def __init__(self) -> None:
        self._buffer = b""
        self._scanned = 0
        self._saw_cr = False

    def feed(self, data: bytes) -> list[bytes]:
        """The events completed by `data`, oldest first. Raises EventTooLarge."""
        buffer = self._buffer + data if self._buffer else data
        if self._saw_cr or b"\r" in data:
            self._saw_cr = True
            return self._feed_any_line_end(buffer)
        events = []
        start = 0
        # A terminator may straddle the cut: look again at the last byte of what was scanned before.
        end = buffer.find(b"\n\n", max(0, self._scanned - 1))
        while end >= 0:
            end += 2
            events.append(buffer[start:end])
            start = end
            end = buffer.find(b"\n\n", start)
        self._keep(buffer[start:] if start else buffer)
        return events

    def flush(self) -> bytes:
        """What came after the last terminator; the stream has ended."""
        rest, self._buffer, self._scanned = self._buffer, b"", 0
        return rest

    def _feed_any_line_end(self, buffer: bytes) -> list[bytes]:
        events = []
        start = 0
        # A CR at the very end may be half of a CRLF: decided when the next byte is here.
        limit = len(buffer) - 1 if buffer.endswith(b"\r") else len(buffer)
        position = max(0, self._scanned - 3)
        while found := _BLANK_LINE.search(buffer, position):
            if found.end() > limit:
                break
            events.append(buffer[start : found.end()])
            start = position = found.end()
        self._keep(buffer[start:] if start else buffer)
        return events

    def _keep(self, rest: bytes) -> None:
        if len(rest) > MAX_EVENT_BYTES:
            raise EventTooLarge(f"an event of more than {MAX_EVENT_BYTES} bytes")
        self._buffer = rest
        self._scanned = len(rest)


def event_data(event: bytes) -> bytes | None:
    """The event's data (its `data` lines joined by LF), or None where it has none (a comment, a lone field)."""
    if event.startswith(b"data: ") and event.find(b"\n") == len(event) - 2 and b"\r" not in event:
        return event[6:-2]
    lines = []
    for line in event.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n"):
        name, colon, value = line.partition(b":")
        if name == b"data":
            lines.append(value.removeprefix(b" ") if colon else b"")
    return b"\n".join(lines) if lines else None
