"""Unit tests of rules as `promtool test rules` takes them, written as a table."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

Series = dict[str, str]


def promtool() -> str:
    """Its path. Skips the test where the program can't be had (`.ci/run` installs it)."""
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not installed (Debian and Ubuntu: apt-get install prometheus)")
    return found


def ramp(*phases: tuple[int, float], start: float = 0) -> str:
    """A counter: (samples, increase per sample) one after another."""
    parts, value = [], start
    for samples, step in phases:
        parts.append(f"{value:g}+{step:g}x{samples - 1}")
        value += step * samples
    return " ".join(parts)


def level(*phases: tuple[int, float]) -> str:
    """A gauge: (samples, value) one after another."""
    return " ".join(f"{value:g}+0x{samples - 1}" for samples, value in phases)


def histogram(name: str, labels: str, bounds: tuple[float, ...], *phases: tuple[int, float, float]) -> Series:
    """Phases of (samples, observed per sample, each so long in seconds); bounds are those of the buckets."""
    comma = "," if labels else ""
    series = {
        f'{name}_bucket{{{labels}{comma}le="{bound:g}"}}': ramp(
            *((samples, count if seconds <= bound else 0) for samples, count, seconds in phases)
        )
        for bound in bounds
    }
    series[f'{name}_bucket{{{labels}{comma}le="+Inf"}}'] = ramp(*((samples, count) for samples, count, _ in phases))
    series[f"{name}_count{{{labels}}}"] = series[f'{name}_bucket{{{labels}{comma}le="+Inf"}}']
    series[f"{name}_sum{{{labels}}}"] = ramp(*((samples, count * seconds) for samples, count, seconds in phases))
    return series


@dataclass
class Case:
    """What is scraped, and at which times the alert fires."""

    alert: str
    sentence: str
    series: Series
    firing: tuple[str, ...] = ()
    quiet: tuple[str, ...] = ()
    interval: str = "1m"
    annotations: dict[str, Any] = field(default_factory=dict)
    """Expected at the first time of `firing`: labels and every annotation; empty: not looked at."""

    def group(self) -> dict[str, Any]:
        """As a test group."""
        alive = f'count(ALERTS{{alertname="{self.alert}",alertstate="firing"}}) or vector(0)'
        return {
            "interval": self.interval,
            "name": f"{self.alert}: {self.sentence}",
            "input_series": [{"series": name, "values": values} for name, values in self.series.items()],
            "promql_expr_test": [
                {"expr": alive, "eval_time": when, "exp_samples": [{"labels": "{}", "value": value}]}
                for times, value in ((self.firing, 1), (self.quiet, 0))
                for when in times
            ],
        } | self._annotated()

    def _annotated(self) -> dict[str, Any]:
        if not self.annotations:
            return {}
        expected = {"alertname": self.alert, "eval_time": self.firing[0], "exp_alerts": [self.annotations]}
        return {"alert_rule_test": [expected]}


def run(folder: Path, rules: list[Path], cases: list[Case]) -> str:
    """promtool's verdict: empty when all holds. Rules are evaluated as often as a case's series have samples."""
    paths = []
    for every in sorted({case.interval for case in cases}):
        groups = [case.group() for case in cases if case.interval == every]
        names = [str(path) for path in rules]
        paths.append(folder / f"every-{every}.test.yml")
        # Without an order promtool takes groups at random, and at long intervals what was recorded before is stale.
        order = [group["name"] for path in rules for group in yaml.safe_load(path.read_text())["groups"]]
        document = {"rule_files": names, "evaluation_interval": every, "group_eval_order": order, "tests": groups}
        paths[-1].write_text(json.dumps(document))  # JSON is YAML
    command = [promtool(), "test", "rules", *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return "" if done.returncode == 0 else done.stdout + done.stderr
