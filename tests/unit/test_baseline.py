"""Baselines: what they hold, how they age, how many there can be, and that they outlive a restart."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from ledgers import HERE, WALL_NS, attempt, ledger, timings, whole

from tracing.ledger import Ledger, Outcome, Usage
from tracing.observer.baseline import (
    ENOUGH_REQUESTS,
    FIGURES,
    WINDOW_SECONDS,
    WINDOWS,
    Baselines,
    Classes,
    ClassKey,
    class_of,
)
from tracing.observer.baseline_file import BaselineFile
from tracing.observer.rows import Row
from tracing.observer.sketch import RELATIVE_ERROR
from tracing.stages import timeline_of

WINDOW_NS = WINDOW_SECONDS * 1_000_000_000


def row_of(made: Ledger) -> Row:
    return Row(made, timeline_of(made, HERE), HERE, True)


def fill(baselines: Baselines, make: Callable[[], Ledger] = ledger, requests: int = 1) -> ClassKey:
    made = make()
    for _ in range(requests):
        baselines.add(row_of(made))
    return class_of(made)


def test_a_baseline_has_every_stage_and_figure_of_its_class():
    baselines = Baselines()
    key = fill(baselines, requests=3)
    found = baselines.of(key, WALL_NS)
    assert found.requests == 3
    stages = timeline_of(ledger(), HERE).stages
    assert set(found.names()) == {*stages, "streaming", "closing", "unaccounted", *FIGURES} - {"client_rtt"}
    for stage, seconds in stages.items():
        assert found.median(stage) == pytest.approx(seconds, rel=RELATIVE_ERROR)
    assert found.median("tpot") == pytest.approx(0.002, rel=RELATIVE_ERROR)
    assert found.median("mean_batch") == pytest.approx(4, rel=RELATIVE_ERROR)
    assert found.median("step_gap") == pytest.approx(0.003 / 50, rel=RELATIVE_ERROR)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({}, ("m", "engine", "le_256", True)),
        ({"usage": Usage(input_tokens=257)}, ("m", "engine", "le_1024", True)),
        ({"usage": Usage(input_tokens=5000)}, ("m", "engine", "gt_4096", True)),
        ({"usage": Usage()}, ("m", "engine", "unknown", True)),
        ({"model": "n", "upstream": "far"}, ("n", "far", "le_256", True)),
    ],
)
def test_a_class_is_model_upstream_and_prompt_size(changes, key):
    assert class_of(ledger(**changes)) == key


def test_whole_answers_are_not_compared_with_streams():
    baselines = Baselines()
    fill(baselines)
    key = fill(baselines, whole)
    assert not key.stream
    assert baselines.of(key, WALL_NS).requests == 1
    assert baselines.of(key, WALL_NS).median("engine_decode") == pytest.approx(0.1, rel=RELATIVE_ERROR)


def test_only_what_ended_well_and_reached_an_upstream_is_added():
    baselines = Baselines()
    for changes in ({"outcome": Outcome.UPSTREAM_ERROR}, {"outcome": Outcome.CLIENT_CANCELLED}, {"attempts": []}):
        fill(baselines, lambda changes=changes: ledger(**changes))
    assert baselines.changes == 0
    assert baselines.of(class_of(ledger()), WALL_NS).requests == 0


def test_thirty_requests_are_enough():
    baselines = Baselines()
    key = fill(baselines, requests=ENOUGH_REQUESTS - 1)
    assert not baselines.of(key, WALL_NS).is_enough
    fill(baselines)
    assert baselines.of(key, WALL_NS).is_enough


def test_all_sizes_of_a_model_at_an_upstream_can_be_taken_together():
    baselines = Baselines()
    key = fill(baselines, requests=2)
    fill(baselines, lambda: ledger(usage=Usage(input_tokens=900)), 3)
    fill(baselines, lambda: ledger(model="other"), 5)
    fill(baselines, whole, 7)
    assert baselines.of_all_sizes(key, WALL_NS).requests == 5


def test_retries_that_most_did_not_need_are_zero_in_the_median():
    baselines = Baselines()
    key = fill(baselines, requests=9)
    retried = [attempt(1, connect_start=5.0, end=5.5, error="connect"), attempt(2)]
    fill(baselines, lambda: ledger(attempts=retried))
    assert baselines.of(key, WALL_NS).median("failed_attempts") == 0.0


def test_old_windows_are_forgotten_when_new_ones_come_and_when_time_passes():
    baselines = Baselines()
    for age in range(WINDOWS + 2):
        key = fill(baselines, lambda age=age: ledger(wall_ns=WALL_NS + age * WINDOW_NS))
    (_, kept) = msgspec.msgpack.decode(baselines.encoded(), type=Classes)[0]
    assert len(kept) == WINDOWS
    newest = WALL_NS + (WINDOWS + 1) * WINDOW_NS
    assert baselines.of(key, newest).requests == WINDOWS
    assert baselines.of(key, newest + 2 * WINDOW_NS).requests == WINDOWS - 2
    assert baselines.of(key, newest + WINDOWS * WINDOW_NS).requests == 0
    fill(baselines, lambda: ledger(wall_ns=WALL_NS))  # began before the oldest window that is kept
    assert baselines.of(key, newest).requests == WINDOWS
    fill(baselines, lambda: ledger(wall_ns=WALL_NS + WINDOWS * WINDOW_NS))  # a long one: began in the window before
    assert baselines.of(key, newest).requests == WINDOWS + 1


def test_the_class_that_was_used_longest_ago_leaves_when_there_are_too_many():
    baselines = Baselines(max_classes=2)
    first, second = (fill(baselines, lambda m=m: ledger(model=m)) for m in ("a", "b"))
    fill(baselines, lambda: ledger(model="a"))
    third = fill(baselines, lambda: ledger(model="c"))
    assert [baselines.of(key, WALL_NS).requests for key in (first, second, third)] == [2, 0, 1]


# The file


def saved(path) -> Baselines:
    baselines = Baselines()
    fill(baselines, requests=40)
    fill(baselines, whole)
    BaselineFile(path, baselines).save()
    return baselines


def loaded(path) -> Baselines:
    baselines = Baselines()
    BaselineFile(path, baselines).load()
    return baselines


def test_a_restart_loses_nothing(tmp_path):
    path = tmp_path / "state" / "baselines.msgpack"
    before, after = saved(path), loaded(path)
    for key in (class_of(ledger()), class_of(whole())):
        one, other = before.of(key, WALL_NS), after.of(key, WALL_NS)
        assert one.requests == other.requests > 0
        assert {name: one.of(name) for name in one.names()} == {name: other.of(name) for name in other.names()}
    fill(after)
    assert after.of(class_of(ledger()), WALL_NS).requests == 41
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert path.stat().st_mode & 0o777 == 0o600


def test_nothing_is_written_when_nothing_is_new(tmp_path):
    path = tmp_path / "baselines.msgpack"
    baselines = Baselines()
    file = BaselineFile(path, baselines)
    file.save()
    assert not path.exists()
    fill(baselines)
    file.save()
    path.unlink()
    file.save()
    assert not path.exists()


@pytest.mark.parametrize("data", [b"", b"not a baseline", msgspec.msgpack.encode({"version": 2, "classes": []})])
def test_a_damaged_or_newer_file_is_moved_aside_and_new_baselines_begin(tmp_path, data, caplog):
    path = tmp_path / "baselines.msgpack"
    path.write_bytes(data)
    assert loaded(path).of(class_of(ledger()), WALL_NS).requests == 0
    assert not path.exists()
    assert (tmp_path / "baselines.msgpack.old").read_bytes() == data
    assert "new ones are begun" in caplog.text


def test_a_file_cut_short_is_not_believed(tmp_path):
    path = tmp_path / "baselines.msgpack"
    saved(path)
    path.write_bytes(path.read_bytes()[:-20])
    assert loaded(path).of(class_of(ledger()), WALL_NS).requests == 0


def test_a_disk_that_refuses_is_logged_and_tried_again(tmp_path, caplog):
    blocked = tmp_path / "state"
    blocked.write_text("a file where the folder should be")
    baselines = Baselines()
    fill(baselines)
    file = BaselineFile(blocked / "baselines.msgpack", baselines)
    file.save()
    assert "could not be saved" in caplog.text
    blocked.unlink()
    file.save()
    assert loaded(blocked / "baselines.msgpack").of(class_of(ledger()), WALL_NS).requests == 1


def test_timings_that_no_engine_gave_are_absent_not_zero():
    baselines = Baselines()
    key = fill(baselines, lambda: ledger(timings=None))
    found = baselines.of(key, WALL_NS)
    assert found.of("mean_batch") is None
    assert found.of("computed_tokens") is None
    key = fill(
        baselines, lambda: ledger(timings=timings(prompt_n=None), usage=Usage(input_tokens=31, cached_tokens=16))
    )
    assert baselines.of(key, WALL_NS).median("computed_tokens") == pytest.approx(15, rel=RELATIVE_ERROR)
