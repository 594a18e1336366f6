"""Dashboards and rules against a real Prometheus that scraped a real gateway and engine."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from cli.dashboards_check import run_check
from settings.schema import Settings


@pytest.mark.skipif(
    shutil.which("prometheus") is None,
    reason="prometheus is not installed (Debian, Ubuntu: apt-get install prometheus)",
)
def test_every_query_of_every_panel_and_rule_has_an_answer(tmp_path: Path) -> None:
    report = run_check(Settings(state_dir=tmp_path), seconds=15, pictures=tmp_path / "img")
    assert {key: report[key] for key in ("empty", "errors", "lint")} == {"empty": [], "errors": [], "lint": []}
    assert report["panels"] > 60
    assert report["queries"] > 150
    assert report["exemplars"] > 0
    assert report["seconds"] < 180
    # What may be empty is little; GPUs and conditions of alerts apart, a load leaves something everywhere.
    excused = [place for place in report["excused"] if not place.startswith(("alert ", "Tokenline: Engine, "))]
    assert set(excused) <= {
        "Tokenline: Where the time goes, Records lost, anomalies",
        "Tokenline: Where the time goes, Clients that left",
    }
    # The dead upstream of the load is what an alert must see.
    assert "alert TokenlineUpstreamDown" not in report["excused"]
    assert len(list((tmp_path / "img").glob("tokenline-*.svg"))) == 4
