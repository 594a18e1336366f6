"""Stop strings: found wherever the text is cut, and never shown, not even their first letters."""

from __future__ import annotations

from collections.abc import Sequence


class StopFinder:
    """Looks for the stop string that is complete first (of two that end together, the longer one).

    Text that may be the beginning of a stop string is held back, so the answer is the same however it was cut.
    """

    __slots__ = ("_held", "_stops", "found")

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """The text that may be shown now. After a stop string was found (`found`), always empty."""
        if self.found or not text:
            return ""
        buffer = self._held + text
        ends = [(at + len(stop), at) for stop in self._stops if (at := buffer.find(stop)) >= 0]
        if ends:
            self.found = True
            self._held = ""
            return buffer[: min(ends)[1]]
        keep = max(_overlap(buffer, stop) for stop in self._stops)
        shown = len(buffer) - keep
        self._held = buffer[shown:]
        return buffer[:shown]

    def finish(self) -> str:
        """What was held back: no stop string came of it."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, and not all of it."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
