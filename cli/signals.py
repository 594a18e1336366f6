"""Requests by signal: to end (Ctrl-C, SIGTERM, a closed terminal), or to reload (SIGHUP that is no closed terminal)."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Asked:
    """How often this process was asked to end: once is in order, twice is at once. And whether to reload."""

    def __init__(self) -> None:
        self.times = 0
        self.to_reload = False
        """Set by SIGHUP; whoever reloads puts it back."""

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
    """Counts the signals instead of dying of them; puts the former handlers back at the end.

    SIGHUP says that the terminal was closed where this process had one and has it no more; else it asks for a reload.
    """
    asked = Asked()
    lives_on = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # nohup
    had_terminal = has_terminal() and not lives_on

    def count(_number: int, _frame: FrameType | None) -> None:
        asked.times += 1

    def hang_up(_number: int, _frame: FrameType | None) -> None:
        if had_terminal and not has_terminal():
            asked.times += 1
        else:
            asked.to_reload = True

    former = {number: signal.signal(number, count) for number in SIGNALS}
    former[signal.SIGHUP] = signal.signal(signal.SIGHUP, hang_up)
    try:
        yield asked
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def has_terminal() -> bool:
    """Whether a terminal controls this process."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True
