"""The size of /metrics and the time that it takes, with as many labels as there may be."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST_MEGABYTES = 5.0
MOST_MS = 200.0


@pytest.mark.e2e
@pytest.mark.parametrize(("models", "upstreams"), [(200, 10), (64, 1)])
def test_the_page_stays_under_5_megabytes_and_200_ms(models: int, upstreams: int) -> None:
    command = [sys.executable, "-m", "benchmarks.metrics_page", f"--models={models}", f"--upstreams={upstreams}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["same_bytes"]  # as prometheus_client's own encoder, which takes many times as long
    assert 1 < figures["megabytes"] < MOST_MEGABYTES
    assert figures["openmetrics_ms"] < MOST_MS
    assert figures["text_ms"] < MOST_MS
