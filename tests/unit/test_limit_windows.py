"""The sliding minute and the calendar: never more than the limit, and the waits that are told are true."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.limits.periods import Calendar
from gateway.limits.window import SLOT_NS, SlidingWindow

START_NS = 7_300_000_000
steps = st.lists(st.tuples(st.integers(0, 90_000_000_000), st.integers(0, 50)), max_size=60)


def replay(events: list[tuple[int, int]]) -> tuple[SlidingWindow, list[tuple[int, int]], int]:
    """The window after `(wait, amount)` events, the events as (moment, amount), and the last moment."""
    window, now, seen = SlidingWindow(), START_NS, []
    for wait, amount in events:
        now += wait
        window.add(now, amount)
        seen.append((now, amount))
    return window, seen, now


@given(steps, st.integers(0, 90_000_000_000))
def test_everything_of_the_last_minute_counts_and_nothing_older_than_61_seconds(events, wait) -> None:
    window, seen, last = replay(events)
    now = last + wait
    total = window.total(now)
    assert total >= sum(amount for moment, amount in seen if now - moment < 60 * SLOT_NS)
    assert total <= sum(amount for moment, amount in seen if now - moment <= 61 * SLOT_NS)


@given(steps, st.integers(1, 200))
def test_the_wait_that_is_told_is_the_shortest_that_helps(events, limit) -> None:
    window, _, now = replay(events)
    wait = window.below_in_ns(now, limit)
    assert (wait == 0) == (window.total(now) < limit)
    if wait:
        assert replay(events)[0].total(now + wait - 1) >= limit
        assert window.total(now + wait) < limit


@given(steps)
def test_after_the_reset_that_is_told_nothing_counts(events) -> None:
    window, _, now = replay(events)
    assert window.total(now + window.empty_in_ns(now)) == 0


@given(st.lists(st.integers(0, 3_000_000_000), min_size=1, max_size=200), st.integers(1, 20))
def test_no_sixty_seconds_see_more_than_the_limit(waits, limit) -> None:
    window, now, let_in = SlidingWindow(), START_NS, []
    for wait in waits:
        now += wait
        if window.total(now) < limit:
            window.add(now, 1)
            let_in.append(now)
    for first in let_in:
        assert sum(first <= moment < first + 60 * SLOT_NS for moment in let_in) <= limit


@pytest.mark.parametrize(
    ("moment", "day", "month", "day_end", "month_end"),
    [
        ("2026-11-30T23:59:59", "2026-11-30", "2026-11", "2026-12-01", "2026-12-01"),
        ("2026-12-31T00:00:00", "2026-12-31", "2026-12", "2027-01-01", "2027-01-01"),
        ("2028-02-28T12:00:00", "2028-02-28", "2028-02", "2028-02-29", "2028-03-01"),
    ],
)
def test_days_and_months_are_those_of_utc(moment, day, month, day_end, month_end) -> None:
    def ns(text: str) -> int:
        return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()) * 10**9

    calendar = Calendar()
    calendar.at(ns("2027-05-05"))  # an earlier look, even from later, changes nothing
    found = calendar.at(ns(moment))
    assert (found.day, found.month) == (day, month)
    assert (found.day_end_ns, found.month_end_ns) == (ns(day_end), ns(month_end))
