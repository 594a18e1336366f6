"""Several workers of one machine without Redis: a key's limits hold over all of them together."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.keys.limits import Limits
from gateway.keys.plans import Plans
from gateway.keys.record import KeyRecord
from gateway.limits import board as board_module
from gateway.limits.board import Board
from gateway.limits.budgets import Budgets
from gateway.limits.choice import limiter_from
from gateway.limits.grant import Grant
from gateway.limits.local import Account, LocalLimits
from gateway.limits.standing import Standing
from gateway.limits.window import SlidingWindow
from protocol.errors import ApiError
from settings.schema import ServerSettings, Settings
from tracing.clock import FakeClock, SystemClock


class Machine:
    """Workers with one run folder and one clock."""

    def __init__(self, folder: Path, workers: int = 3) -> None:
        self.clock = FakeClock()
        self._folder = folder
        self._count = workers
        self.workers = [self.started(number) for number in range(workers)]

    def started(self, number: int) -> LocalLimits:
        """A worker, as a new process of that number is."""
        self.budgets = Budgets(self._folder / "budgets.sqlite", self.clock, 1.0, is_shared=True)
        board = Board(self._folder / "limits", number, self._count)
        return LocalLimits(Plans({}), self.clock, self.budgets, board)

    async def let_in(self, number: int, key: KeyRecord) -> Grant | None:
        """A request at one worker; None: it is refused."""
        try:
            return await self.workers[number].enter(key, "req")
        except ApiError:
            return None


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def key(key_id: str = "key_1", **limits: int) -> KeyRecord:
    return KeyRecord(key_id, "app", b"", 0, limits=Limits(**limits))


async def test_sixty_a_minute_are_sixty_over_all_workers(machine: Machine) -> None:
    app = key(requests_per_minute=60)
    grants = [await machine.let_in(number % 3, app) for number in range(80)]
    assert sum(grant is not None for grant in grants) == 60
    left = [int(dict(grant.headers)[b"x-ratelimit-remaining-requests"]) for grant in grants if grant]
    assert left == list(range(59, -1, -1))
    assert await machine.let_in(0, key("key_2", requests_per_minute=60))


async def test_the_wait_that_is_told_is_that_of_all_workers(machine: Machine) -> None:
    app = key(requests_per_minute=2)
    await machine.let_in(0, app)
    machine.clock.advance_ms(20_000)
    await machine.let_in(1, app)
    with pytest.raises(ApiError) as caught:
        await machine.workers[2].enter(app, "req")
    assert 40 <= int(caught.value.retry_after or 0) <= 41
    machine.clock.advance_ms(41_000)
    assert await machine.let_in(2, app)
    assert not await machine.let_in(0, app)


async def test_places_in_flight_and_tokens_are_those_of_all_workers(machine: Machine) -> None:
    app = key(concurrent_requests=2, tokens_per_minute=100)
    first, second = await machine.let_in(0, app), await machine.let_in(1, app)
    assert not await machine.let_in(2, app)
    first.leave(60)
    third = await machine.let_in(2, app)
    assert dict(third.headers)[b"x-ratelimit-remaining-tokens"] == b"40"
    second.leave(40)
    third.leave(0)
    with pytest.raises(ApiError, match="100 of 100 tokens"):
        await machine.workers[2].enter(app, "req")
    machine.clock.advance_ms(61_000)
    assert await machine.let_in(0, app)


async def test_a_worker_that_is_started_again_goes_on_with_its_minute_and_has_nothing_in_flight(
    machine: Machine,
) -> None:
    app = key(requests_per_minute=4, concurrent_requests=2)
    await machine.let_in(0, app)
    await machine.let_in(0, app)
    assert not await machine.let_in(1, app)  # both places are taken
    machine.workers[0] = machine.started(0)
    assert await machine.let_in(1, app)
    assert await machine.let_in(0, app)
    assert not await machine.let_in(2, app)  # four in this minute


async def test_a_place_goes_to_another_key_only_when_its_own_is_at_rest(machine: Machine, monkeypatch) -> None:
    monkeypatch.setattr(board_module, "BUCKETS", 1)
    busy = [key(f"key_{number}", concurrent_requests=1, requests_per_minute=5) for number in range(8)]
    grants = [await machine.let_in(0, one) for one in busy]
    alone = key("key_9", requests_per_minute=3)
    assert await machine.let_in(0, alone)  # its counters are seen by nobody else, and they are kept
    assert [bool(await machine.let_in(0, alone)) for _ in range(3)] == [True, True, False]
    assert await machine.let_in(1, alone)
    grants[3].leave(0)
    other = key("key_10", requests_per_minute=3)
    assert await machine.let_in(0, other)
    assert not await machine.let_in(1, busy[2])  # still in flight at the first worker
    assert await machine.let_in(0, busy[3])  # its minute began anew


async def test_what_a_sibling_used_of_a_days_budget_is_known_after_the_next_flush(tmp_path: Path) -> None:
    machine = Machine(tmp_path, workers=1)
    first, first_budgets = machine.workers[0], machine.budgets
    second, second_budgets = machine.started(0), machine.budgets
    app = key(tokens_per_day=100)
    (await first.enter(app, "req")).leave(100)
    assert await second.enter(app, "req")
    await first_budgets.flush()
    await second_budgets.flush()
    with pytest.raises(ApiError, match="100 of 100 tokens today"):
        await second.enter(app, "req")


async def test_two_that_come_for_the_last_place_at_once_are_never_both_let_in(machine: Machine, monkeypatch) -> None:
    app = key(requests_per_minute=1, concurrent_requests=1)
    standing = LocalLimits._standing
    overtaking: list[Grant | None] = []

    def overtaken(limiter: LocalLimits, account: Account, now: int) -> Standing:
        """Between counting and looking, a sibling counts and looks, too."""
        monkeypatch.setattr(LocalLimits, "_standing", standing)
        with pytest.raises(ApiError):
            machine.workers[1].admit(app, app.limits)
        machine.workers[1]._account(app, app.limits).counters.running += 1  # and another has counted, not looked
        return standing(limiter, account, now)

    monkeypatch.setattr(LocalLimits, "_standing", overtaken)
    overtaking.append(await machine.let_in(0, app))
    assert overtaking == [None]
    machine.workers[1]._account(app, app.limits).counters.running -= 1
    assert await machine.let_in(2, app)  # nothing is left of either
    assert not await machine.let_in(0, app)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=st.lists(st.tuples(st.integers(0, 90_000), st.integers(0, 2), st.integers(1, 40)), max_size=40))
def test_windows_of_several_workers_together_count_as_one_does(events) -> None:
    alone, parts, now = SlidingWindow(), [SlidingWindow() for _ in range(3)], 5_000_000_000
    for wait_ms, worker, amount in events:
        now += wait_ms * 1_000_000
        alone.add(now, amount)
        parts[worker].add(now, amount)
        own, others = parts[worker], [part for part in parts if part is not parts[worker]]
        assert own.total(now) + sum(other.seen(now) for other in others) == alone.total(now)
        assert own.below_in_ns(now, 50, others) == alone.below_in_ns(now, 50)
        assert own.empty_in_ns(now, others) == alone.empty_in_ns(now)


def test_whoever_reads_while_another_writes_never_sees_less_than_what_counts() -> None:
    clock, window = SystemClock(), SlidingWindow()
    stop = threading.Event()

    def write() -> None:
        second = 0
        while not stop.is_set():
            second += 1
            window.add(second * 1_000_000_000, 1)

    writer = threading.Thread(target=write)
    writer.start()
    end = clock.mono_ns() + 300_000_000
    too_few = 0
    while clock.mono_ns() < end:
        # In the second after the last one 60 of the 61 before it count, and more when the writer is there already.
        newest = window.newest
        too_few += newest > 100 and window.seen((newest + 1) * 1_000_000_000) < 60
    stop.set()
    writer.join()
    assert not too_few


def test_the_file_is_this_users_alone_and_a_workers_own_room_is_taken_at_once(tmp_path: Path) -> None:
    Board(tmp_path / "limits", 0, 4)
    found = (tmp_path / "limits").stat()
    assert found.st_mode & 0o777 == 0o600
    assert 0.25 * found.st_size <= found.st_blocks * 512 < 0.3 * found.st_size
    Board(tmp_path / "limits", 3, 4)
    assert (tmp_path / "limits").stat().st_blocks == pytest.approx(2 * found.st_blocks, rel=0.05)


async def test_where_there_is_no_room_each_worker_limits_by_itself_and_says_so(tmp_path, monkeypatch, caplog) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    (tmp_path / "run").mkdir()
    found = Settings(state_dir=tmp_path, server=ServerSettings(workers=2))
    limiter = limiter_from(found, FakeClock(), Plans({}), 0)
    assert limiter.degraded
    assert "each of the 2 workers limits keys by itself" in caplog.text
    assert await limiter.enter(key(requests_per_minute=1), "req")
    with pytest.raises(ApiError):
        await limiter.enter(key(requests_per_minute=1), "req")
    alone = Settings(state_dir=tmp_path)
    assert not limiter_from(alone, FakeClock(), Plans({}), 0).degraded
