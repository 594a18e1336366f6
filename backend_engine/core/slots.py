"""Slots: the fixed rows of the batch. A request owns one from admission to retirement.

This is the host's side: who owns which row, and what the device is told of it. The rows themselves (tokens, length,
block table, sampling state) lie on the device and are addressed by the slot's index; the host writes a row when it is
taken, adds pages to it, and touches nothing else: steps move it on.
"""

from __future__ import annotations

import msgspec

from backend_engine.core.messages import Sampling


class Slot(msgspec.Struct, frozen=True):
    """One row while a request owns it."""

    index: int
    request_id: str


class Opening(msgspec.Struct, frozen=True):
    """Everything that a row holds, to write it whole."""

    slot: int
    tokens: list[int]
    """Prompt, and the answer so far of a request that is taken up again."""
    prompt_tokens: int
    """How many of `tokens` are the prompt's."""
    most_tokens: int
    """The row is done when it has this many tokens."""
    pages: list[int]
    """Block table: page number of each `page_size` tokens of the sequence."""
    sampling: Sampling
    seed: int
    """64-bit seed of the request's noise: its own, or one that was drawn for it."""
    keeps_progress: bool = False
    """A step in flight moves this row on: what it makes (tokens, length, done, counts) must stay."""


class NewPage(msgspec.Struct, frozen=True):
    """One more page of a row's block table."""

    slot: int
    at: int
    page: int


class Slots:
    """The pool of rows. Invariant: free + used = all, and no index has two owners."""

    def __init__(self, count: int) -> None:
        if count < 1:
            raise ValueError(f"scheduler.max_num_seqs = {count}: the engine needs at least 1 slot")
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        self._owners: dict[int, str] = {}

    @property
    def free(self) -> int:
        """Rows that can be taken."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Rows that requests own."""
        return len(self._owners)

    def can_take(self) -> bool:
        """Whether a row is free."""
        return bool(self._free)

    def take(self, request_id: str) -> Slot:
        """Gives a row to a request."""
        if not self._free:
            raise RuntimeError(f"all {self.count} slots are taken")
        index = self._free.pop()
        self._owners[index] = request_id
        return Slot(index, request_id)

    def give_back(self, slot: Slot) -> None:
        """Frees a row. Only its owner may do that, once."""
        if self._owners.get(slot.index) != slot.request_id:
            raise RuntimeError(f"slot {slot.index} does not belong to request {slot.request_id}")
        del self._owners[slot.index]
        self._free.append(slot.index)

    def check(self) -> None:
        """Raises when the invariant is broken."""
        if len(set(self._free)) + len(self._owners) != self.count or set(self._free) & set(self._owners):
            raise RuntimeError(f"slots are lost or doubled: {self.free} free and {self.used} used of {self.count}")
