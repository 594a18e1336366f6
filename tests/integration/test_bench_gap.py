"""`tokenline bench gap`: a row for each mode, each of which does what its name says. Nothing here depends on speed."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from backend_engine.core.messages import Step
from backend_engine.measuring.gap import MODES, percentile, row_of, settings_for
from loadtest.gap import GapFailed, gap_table

MS = 1_000_000
PARTS = {"schedule", "append_and_stop", "detokenise", "send", "prepare"}


def test_the_table_has_a_row_for_each_mode_and_says_where_the_hosts_time_goes() -> None:
    command = [str(Path(sys.executable).parent / "tokenline"), "bench", "gap", "--json"]
    run = subprocess.run(
        [*command, "--batch", "8", "--forward-ms", "1", "--steps", "20"], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["simulated"] is True
    rows = {row["mode"]: row for row in found["rows"]}
    assert list(rows) == ["synchronous", "text_processes", "static_slots", "asynchronous"]
    for mode, row in rows.items():
        assert set(row["host_ms"]) == PARTS
        assert 0 < row["busy_ratio"] <= 1
        assert row["gap_p95_ms"] >= row["gap_p50_ms"] >= 0
        assert row["tpot_p99_ms"] >= row["tpot_p50_ms"] >= 1
        assert row["tps"] > 0
        assert row["slot_kernel_ms"] > 0
        assert 4 < row["mean_batch"] <= 8
        assert row["steps"] == 20
        # text is made in the loop, or beside it
        assert (row["host_ms"]["detokenise"] > 0) == (mode == "synchronous")
        assert (row["text_process_ms"] > 0) == (mode != "synchronous")


def test_a_row_that_cannot_be_measured_says_which_and_why() -> None:
    with pytest.raises(GapFailed, match=r"mode synchronous could not be measured: .*max_num_seqs"):
        gap_table(batch=0, forward_ms=1, steps=10, progress=lambda mode, share: None)


def test_each_mode_adds_one_thing_to_the_one_before() -> None:
    switches = [settings_for(mode, 256, 35).token_interval for mode in MODES.values()]
    on = [{name for name, value in switch if value} for switch in switches]
    assert [len(later - earlier) for earlier, later in pairwise(on)] == [1, 1, 2]
    assert on[0] == set()
    assert on[-1] - on[-2] == {"async_scheduling", "overlap_token_interval"}


def test_the_figures_of_a_row_are_those_of_its_steps() -> None:
    steps = [Step(4, 4, 35 * MS, gap * MS, 0, 1 * MS) for gap in (0, 0, 5, 2)]
    ends = {"a": [at * 40 * MS for at in range(10)], "b": [at * 50 * MS for at in range(10)], "short": [0, MS]}
    row = row_of("asynchronous", steps, ends, dict.fromkeys(PARTS, 0.0), 0.0)
    assert (row.gap_p50_ms, row.gap_p95_ms) == (1.0, 5.0)
    assert row.busy_ratio == 140 / 147
    assert row.tps == pytest.approx(22 / 0.147)
    assert (row.tpot_p50_ms, row.tpot_p99_ms) == (45.0, 50.0)
    assert (row.slot_kernel_ms, row.mean_batch) == (1.0, 4.0)


def test_a_percentile_is_a_value_that_was_measured() -> None:
    values = [float(number) for number in range(1, 101)]
    assert [percentile(values, share) for share in (0.0, 0.5, 0.95, 0.99, 1.0)] == [1, 50, 95, 99, 100]
    assert percentile([7.0], 0.95) == 7.0
