"""Limits in one worker: each refuses on its own terms, tokens are debited afterwards, budgets outlive a restart."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from gateway.keys.limits import NO_LIMITS, Limits
from gateway.keys.plans import Plans
from gateway.keys.record import KeyRecord
from gateway.keys.sparing import Sparing
from gateway.limits import budgets as budgets_module
from gateway.limits import local as local_module
from gateway.limits.budgets import Budgets
from gateway.limits.grant import tokens_of
from gateway.limits.local import LocalLimits
from protocol.errors import ApiError
from settings.schema import PlanSettings
from tracing.clock import FakeClock
from tracing.ledger import Usage

SECOND_MS = 1000.0


class Bench:
    """One limiter with a clock of its own."""

    def __init__(self, path: Path, plans: dict[str, PlanSettings] | None = None, default: str | None = None) -> None:
        self.clock = FakeClock()
        self.path = path / "budgets.sqlite"
        self.budgets = Budgets(self.path, self.clock, 1.0)
        self.limiter = LocalLimits(Plans(plans or {}, default), self.clock, self.budgets)

    async def enter(self, key: KeyRecord):
        return await self.limiter.enter(key, "req_1")

    async def refused(self, key: KeyRecord) -> ApiError:
        with pytest.raises(ApiError) as caught:
            await self.enter(key)
        return caught.value


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def key(plan: str | None = None, key_id: str = "key_1", **limits: int) -> KeyRecord:
    return KeyRecord(key_id, "app", b"", 0, plan=plan, limits=Limits(**limits))


async def test_a_key_without_limits_costs_nothing(bench: Bench) -> None:
    assert await bench.enter(key()) is None
    assert not bench.limiter._accounts


async def test_requests_of_a_minute_are_counted_told_and_refused(bench: Bench) -> None:
    app = key(requests_per_minute=3)
    left = [dict((await bench.enter(app)).headers)[b"x-ratelimit-remaining-requests"] for _ in range(3)]
    assert left == [b"2", b"1", b"0"]
    bench.clock.advance_ms(20 * SECOND_MS)
    error = await bench.refused(app)
    assert (error.status, error.code) == (429, "rate_limit_exceeded")
    assert "requests_per_minute" in error.message
    assert "3 of 3" in error.message
    headers = dict(error.headers())
    assert 40 <= int(headers[b"retry-after"]) <= 41
    assert headers[b"x-ratelimit-limit-requests"] == b"3"
    assert headers[b"x-ratelimit-remaining-requests"] == b"0"
    bench.clock.advance_ms(int(headers[b"retry-after"]) * SECOND_MS)
    assert await bench.enter(app)


async def test_places_in_flight_are_given_back(bench: Bench) -> None:
    app = key(concurrent_requests=2)
    first, _ = await bench.enter(app), await bench.enter(app)
    error = await bench.refused(app)
    assert error.code == "rate_limit_exceeded"
    assert "concurrent_requests" in error.message
    first.leave(0)
    assert await bench.enter(app)


async def test_tokens_are_debited_after_the_answer_so_one_request_may_overdraw_once(bench: Bench) -> None:
    app = key(tokens_per_minute=100)
    (await bench.enter(app)).leave(99)
    (await bench.enter(app)).leave(5000)
    error = await bench.refused(app)
    assert "5099 of 100 tokens" in error.message
    assert dict(error.headers())[b"x-ratelimit-remaining-tokens"] == b"0"
    bench.clock.advance_ms(61 * SECOND_MS)
    assert await bench.enter(app)


async def test_a_spent_day_is_a_budget_and_ends_at_midnight(bench: Bench) -> None:
    app = key(tokens_per_day=10, tokens_per_month=1000)
    (await bench.enter(app)).leave(10)
    error = await bench.refused(app)
    assert (error.status, error.code) == (429, "budget_exceeded")
    assert "tokens_per_day" in error.message
    bench.clock.advance_ms(error.retry_after * SECOND_MS)
    (await bench.enter(app)).leave(990)
    assert "tokens_per_month" in (await bench.refused(app)).message


async def test_a_keys_own_limits_win_over_its_plans(tmp_path: Path) -> None:
    plans = {"free": PlanSettings(requests_per_minute=1, concurrent_requests=7), "rest": PlanSettings()}
    bench = Bench(tmp_path, plans, default="free")
    assert Plans(plans).limits_of(key("free", requests_per_minute=5)) == Limits(5, None, 7)
    await bench.enter(key(key_id="without"))
    assert "1 of 1" in (await bench.refused(key(key_id="without"))).message
    assert await bench.enter(key("rest", key_id="other")) is None
    error = await bench.refused(key("gone"))
    assert (error.status, error.code) == (403, "plan_not_found")


async def test_budgets_outlive_a_restart_and_are_shared_by_workers(bench: Bench) -> None:
    app = key(tokens_per_month=100)
    (await bench.enter(app)).leave(60)
    await bench.limiter.close()
    other = Budgets(bench.path, bench.clock, 1.0)
    await other.load()
    month = "2027-01"
    assert other.used("key_1", month) == 60
    other.add("key_1", month, 30)
    await other.flush()
    bench.budgets.add("key_1", month, 5)
    await bench.budgets.flush()
    assert bench.budgets.used("key_1", month) == 95


async def test_past_periods_are_forgotten(bench: Bench) -> None:
    (await bench.enter(key(tokens_per_day=100))).leave(60)
    await bench.budgets.flush()
    bench.clock.advance_ms(86_400 * SECOND_MS)
    await bench.budgets.flush()
    assert bench.budgets._used == {}
    with sqlite3.connect(bench.path) as db:
        assert db.execute("SELECT count(*) FROM budgets").fetchone() == (0,)


async def test_a_file_that_cannot_be_written_loses_nothing_that_fits(bench: Bench, monkeypatch) -> None:
    monkeypatch.setattr(budgets_module, "MAX_WAITING", 2)

    def full(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as broken:
        broken.setattr(bench.budgets, "_write", full)
        for number in range(5):
            bench.budgets.add(f"key_{number}", "2027-01", 7)
            await bench.budgets.flush()
    assert bench.budgets.used("key_4", "2027-01") == 7
    await bench.budgets.flush()
    with sqlite3.connect(bench.path) as db:
        assert db.execute("SELECT key_id, tokens FROM budgets").fetchall() == [("key_0", 7), ("key_1", 7)]


async def test_memory_is_bounded_by_the_keys_that_are_remembered(bench: Bench, monkeypatch) -> None:
    monkeypatch.setattr(local_module, "MAX_ACCOUNTS", 10)
    for number in range(50):
        await bench.enter(key(key_id=f"key_{number}", requests_per_minute=1))
    assert len(bench.limiter._accounts) == 10
    assert "1 of 1" in (await bench.refused(key(key_id="key_49", requests_per_minute=1))).message


def test_without_a_count_token_events_are_what_is_debited() -> None:
    assert tokens_of(Usage(input_tokens=5, output_tokens=2, source="usage")) == 7
    assert tokens_of(Usage(output_tokens=3, source="events")) == 3
    assert tokens_of(Usage()) == 0
    assert not NO_LIMITS.any


def test_what_happens_all_the_time_is_said_once_a_minute() -> None:
    clock = FakeClock()
    sparing = Sparing(clock)
    said = []
    for second in range(150):
        if sparing.due():
            said.append(second)
        clock.advance_ms(SECOND_MS)
    assert said == [0, 60, 120]
