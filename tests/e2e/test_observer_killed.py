"""The observer is killed twenty times while requests come in."""

from __future__ import annotations

from pathlib import Path

import pytest
from killing_rig import kill_under_load
from observer_rig import starting

pytestmark = pytest.mark.e2e


def test_killed_twenty_times_under_load_the_store_opens_again_with_whole_traces(tmp_path: Path) -> None:
    with starting(tmp_path) as start:
        kill_under_load(start, 20)
