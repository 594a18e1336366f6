"""How many threads a step on a CPU runs with: all that torch may use, or one fewer.

Alone on a machine all are faster. Where a gateway, a load test or anything else wants the last core, each of a step's
hundreds of matrix products waits for the thread that lost its core, and one fewer is faster, often by far. Nobody can
know that beforehand, so it is measured: steps of about the same size are compared, and now and then one runs the other
way. Packed products give the same bits either way.

Only steps that decode look by themselves: they are many and short. A prompt's step takes seconds, and twice that with
one of two threads, so it looks where decode steps found company, or where they found that it has left.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

PROBE_EVERY = 128
"""Steps of a size for one that runs the other way: seldom enough to stay out of the P99 of the gaps between tokens."""
_RECENT = 0.25
"""Weight of the newest step in what a choice is judged by."""


class _Judged(msgspec.Struct):
    """Steps of one size."""

    pace_ns: list[float | None]
    """A token's share of a step, by choice (0: all threads, 1: one fewer); None: not tried yet."""
    steps: int = 0


class ThreadChoice:
    """Called by the thread that runs the steps. `use` sets the number of threads (torch.set_num_threads)."""

    def __init__(self, most: int, use: Callable[[int], None]) -> None:
        self._most = most
        self._use = use
        self._has_company = False  # as the decode step before found
        self._judged: dict[tuple[bool, int], _Judged] = {}
        self._current: tuple[_Judged, int] | None = None

    def begin(self, tokens: int, *, decodes: bool) -> int:
        """Before a step of so many tokens; `decodes`: no prompt is in it. Returns the number of threads."""
        self._current = None  # also where the step before broke off
        if self._most == 1 or tokens == 0:
            return self._most
        judged = self._judged.setdefault((decodes, tokens.bit_length()), _Judged([None, None]))
        choice = self._choose(judged, decodes)
        judged.steps += 1
        self._current = (judged, choice)
        threads = self._most - choice
        self._use(threads)
        return threads

    def took(self, tokens: int, step_ns: int) -> None:
        """After the step."""
        if self._current is None:
            return
        judged, choice = self._current
        self._current = None
        if judged.steps == 1:
            return  # the first of its size also makes kernels and meets memory that nobody has used
        pace, known = step_ns / tokens, judged.pace_ns[choice]
        judged.pace_ns[choice] = pace if known is None else known + _RECENT * (pace - known)

    def _choose(self, judged: _Judged, decodes: bool) -> int:
        every, fewer = judged.pace_ns
        if every is None:
            return 0
        if fewer is None:
            return 1 if decodes or self._has_company else 0
        better = 0 if every <= fewer else 1
        if decodes:
            self._has_company = better == 1
        is_doubtful = decodes or self._has_company != (better == 1)
        return 1 - better if is_doubtful and judged.steps % PROBE_EVERY == PROBE_EVERY - 1 else better
