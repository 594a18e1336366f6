"""When the step in flight will have ended, at the earliest: how long the plan of the next one can wait for who comes.

A step that is planned as soon as the one before is launched leaves out who arrives while that one runs. So where an
arrival could be let in at once, the plan waits for a share of the step; the rest is the host's to plan and launch in.
"""

from __future__ import annotations

from collections import deque

SHARE = 2 / 3
"""Of a step that may pass before the next one is planned."""
_REMEMBERED = 8
_LEAST_KNOWN = 4


class Foresight:
    """Remembers the last steps that only decoded: a step with prompts in it takes no less."""

    def __init__(self) -> None:
        self._took_ns: deque[int] = deque(maxlen=_REMEMBERED)
        self._began_ns = 0

    def began(self, at_ns: int) -> None:
        """The step in flight began then."""
        self._began_ns = at_ns

    def took(self, forward_ns: int) -> None:
        """A step that only decoded took so long."""
        self._took_ns.append(forward_ns)

    def plan_by_ns(self) -> int:
        """Up to when the next step need not be planned; long ago while too little is known."""
        if len(self._took_ns) < _LEAST_KNOWN:
            return 0
        return self._began_ns + round(min(self._took_ns) * SHARE)
