"""benchmarks/open_streams.py, in small: every stream is held open and every event of it arrives."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).parents[2]


def test_every_stream_is_held_and_every_event_arrives_with_its_delay() -> None:
    options = ["--streams", "60", "--interval", "0.2", "--seconds", "2", "--json"]
    command = [sys.executable, "benchmarks/open_streams.py", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode in (0, 1), done.stderr  # 1: a limit was exceeded, as on a busy machine
    result = json.loads(done.stdout)
    for name in ("direct", "tokenline"):
        row = result[name]
        assert (row["streams"], row["lost"]) == (60, 0)
        assert row["events"] == pytest.approx(result["events_expected"], rel=0.2)
        assert 0 < row["p50_ms"] <= row["p99_ms"] <= row["max_ms"]
    assert 20 < result["worker_rss_before_mb"] <= result["worker_rss_mb"] < 300
