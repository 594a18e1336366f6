"""A ranking of names by a score that changes all the time: the lowest is found without looking at the others."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

_SPARE = 64
"""Entries of the heap that may be out of date before it is made anew, beside as many as are in force."""

_Entry = tuple[int, int, str]
"""Score, turn, name."""


class Ranking:
    """Names by score, lowest first; of equal ones, who was put behind the others longest ago. O(log n)."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._heap: list[_Entry] = []
        """Every entry in force, and some that are not any more."""
        self._turns = 0

    def __bool__(self) -> bool:
        return bool(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def put_last(self, name: str, score: int) -> None:
        """Ranks a name, behind all with the same score."""
        self._turns += 1
        self._push((score, self._turns, name))

    def move(self, name: str, score: int) -> None:
        """A ranked name has another score; it keeps its turn. Nothing for one that is not ranked."""
        entry = self._entries.get(name)
        if entry is not None and entry[0] != score:
            self._push((score, entry[1], name))

    def drop(self, name: str) -> None:
        """Takes a name out, if it is there."""
        self._entries.pop(name, None)

    def lowest(self) -> str | None:
        """The first of all; None: nobody is ranked."""
        heap = self._heap
        while heap:
            if self._entries.get(heap[0][2]) is heap[0]:
                return heap[0][2]
            heappop(heap)
        return None

    def _push(self, entry: _Entry) -> None:
        self._entries[entry[2]] = entry
        heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._entries) + _SPARE:
            self._heap = list(self._entries.values())
            heapify(self._heap)
