"""The rhythm of a stream: did events come one by one, as an engine makes them, or did somebody hold them back?

A layer that buffers shows in two ways. It keeps the whole answer: nothing comes for as long as the engine works, then
all at once. Or it keeps a buffer's worth: events come in clumps with pauses between. An engine that is very fast shows
the same as the first, so that takes evidence: the engine's own decode time, or a shorter answer that came sooner.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

MIN_EVENTS = 8
"""With fewer, two events that share a packet would look like a clump."""
SHORTER = 4
"""A second answer of so many times fewer tokens tells whether the first event waits for the last."""
AT_ONCE_MS = 5.0
CLUMP_SHARE = 0.25
"""Events that are less than this share of the mean gap apart came together."""
MIN_PER_CLUMP = 4
MIN_DECODE_MS = 20.0
MIN_LATER_MS = 30.0

Verdict = Literal["apart", "buffered", "in_pieces", "ask_shorter", "too_few", "too_fast", "busy"]


class Spacing(NamedTuple):
    """When the events with tokens came."""

    events: int
    waited_ms: float
    """From sending to the first."""
    spread_ms: float
    """From the first to the last."""
    clumps: int
    """Groups that came together; as many as events where each came on its own."""


def spacing_of(sent_ns: int, arrivals: Sequence[int]) -> Spacing:
    """Of the instants at which each event had been read."""
    if not arrivals:
        return Spacing(0, 0.0, 0.0, 0)
    spread_ns = arrivals[-1] - arrivals[0]
    together_ns = CLUMP_SHARE * spread_ns / max(1, len(arrivals) - 1)
    gaps = [later - earlier for earlier, later in pairwise(arrivals)]
    clumps = 1 + sum(gap > together_ns for gap in gaps)
    return Spacing(len(arrivals), (arrivals[0] - sent_ns) / 1e6, spread_ns / 1e6, clumps)


def judge(spacing: Spacing, decode_ms: float | None, lag_ms: float, *, shorter: Spacing | None = None) -> Verdict:
    """What the rhythm says. `decode_ms`: from the first token to the last by the engine's own clock.

    `lag_ms`: how long this process was kept from reading at worst; what it slept through, it can't judge.
    """
    if spacing.events < MIN_EVENTS:
        return "too_few"
    if not _is_at_once(spacing):
        if not _is_in_pieces(spacing):
            return "apart"
        return "busy" if lag_ms > spacing.spread_ms / spacing.clumps / 2 else "in_pieces"
    if lag_ms > spacing.waited_ms / 2:
        return "busy"
    if decode_ms is not None:
        return "buffered" if decode_ms >= max(MIN_DECODE_MS, 4 * spacing.spread_ms) else "too_fast"
    if shorter is None:
        return "ask_shorter"
    if not shorter.events or shorter.events >= spacing.events:
        return "too_fast"
    later_ms = spacing.waited_ms - shorter.waited_ms
    return "buffered" if later_ms >= max(MIN_LATER_MS, 0.3 * spacing.waited_ms) else "too_fast"


def _is_at_once(spacing: Spacing) -> bool:
    return spacing.spread_ms < AT_ONCE_MS or (spacing.clumps <= 2 and spacing.spread_ms < 0.2 * spacing.waited_ms)


def _is_in_pieces(spacing: Spacing) -> bool:
    return spacing.events >= 2 * MIN_EVENTS and spacing.clumps * MIN_PER_CLUMP <= spacing.events
