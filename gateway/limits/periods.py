"""Days and months by UTC, which token budgets are counted in."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import msgspec


class Periods(msgspec.Struct, frozen=True):
    """The day and the month of a moment: names, and when they end (ns since 1970)."""

    day: str
    """2026-11-30"""
    month: str
    """2026-11"""
    day_end_ns: int
    month_end_ns: int


class Calendar:
    """Tells the periods of a wall time; works them out once a day."""

    def __init__(self) -> None:
        self._today = Periods("", "", 0, 0)
        self._begins_ns = 0

    def at(self, wall_ns: int) -> Periods:
        """The day and month of `wall_ns`."""
        if not self._begins_ns <= wall_ns < self._today.day_end_ns:
            midnight = datetime.fromtimestamp(wall_ns / 1e9, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
            tomorrow = midnight + timedelta(days=1)
            next_month = (midnight.replace(day=1) + timedelta(days=32)).replace(day=1)
            self._begins_ns = _ns(midnight)
            self._today = Periods(f"{midnight:%Y-%m-%d}", f"{midnight:%Y-%m}", _ns(tomorrow), _ns(next_month))
        return self._today


def _ns(moment: datetime) -> int:
    return int(moment.timestamp()) * 1_000_000_000
