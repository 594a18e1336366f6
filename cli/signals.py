"""Requests to end: Ctrl-C, SIGTERM, a closed terminal."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Asked:
    """How often this process was asked to end: once is in order, twice is at once."""

    def __init__(self) -> None:
        self.times = 0

    @property
    def to_end(self) -> bool:
        """Asked at least once."""
        return self.times > 0

    @property
    def to_hurry(self) -> bool:
        """Asked again."""
        return self.times > 1


@contextmanager
def ending_signals() -> Iterator[Asked]:
    """Counts the signals instead of dying of them; puts the former handlers back at the end."""
    asked = Asked()

    def count(_number: int, _frame: FrameType | None) -> None:
        asked.times += 1

    former = {number: signal.signal(number, count) for number in SIGNALS}
    try:
        yield asked
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
