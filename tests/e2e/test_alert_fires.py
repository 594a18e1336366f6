"""From a queue that is too long to the very request: the alert fires, names the stage, and its exemplar opens."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
import time
from pathlib import Path

import httpx
import msgspec
import psutil
import pytest
from line_rig import TOKENLINE

from cli.temporary import TemporaryLine, temporary_line
from dashboards.checks.load import Load
from dashboards.checks.run import exemplar_traces
from dashboards.checks.server import Prometheus, running_prometheus
from dashboards.files import write_files
from dashboards.prometheus.files import prometheus_files, scrape_configuration
from dashboards.prometheus.promql import Windows
from dashboards.prometheus.recording import FIGURES
from dashboards.sources import default_places
from dashboards.yaml import yaml_text
from settings.schema import Settings, SloSettings

WITHIN_SECONDS = 120
SCALE = Windows(1 / 15)
"""Five minutes become 20 s."""

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None,
    reason="prometheus is not installed (Debian, Ubuntu: apt-get install prometheus)",
)


def configured(folder: Path, line: TemporaryLine) -> Path:
    """Rules for an objective that a queue of this load misses, with short windows."""
    settings = Settings(state_dir=folder, slo={"default": SloSettings(ttft_ms=150)})
    places = msgspec.structs.replace(
        default_places(settings), targets=(line.ops_url.removeprefix("http://"),), alertmanagers=()
    )
    files = prometheus_files(settings, places, SCALE)
    files["prometheus/prometheus.yml"] = yaml_text(scrape_configuration(places, seconds=1))
    write_files(folder, files)
    return folder / "prometheus" / "prometheus.yml"


def firing(prometheus: Prometheus, name: str) -> dict[str, str] | None:
    """The annotations of an alert that fires."""
    alerts = prometheus.ask("/alerts")["alerts"]
    found = [a for a in alerts if a["labels"]["alertname"] == name and a["state"] == "firing"]
    return found[0]["annotations"] if found else None


def fires_within(prometheus: Prometheus, name: str, seconds: float) -> dict[str, str]:
    """Waits for an alert; its annotations."""
    deadline = time.monotonic() + seconds
    while (annotations := firing(prometheus, name)) is None:
        assert time.monotonic() < deadline, f"{name} did not fire within {seconds} s"
        time.sleep(1)
    return annotations


@needs_prometheus
def test_a_hung_engine_with_no_request_that_ends_burns_the_budget_all_the_same(tmp_path: Path) -> None:
    with temporary_line() as line, running_prometheus(configured(tmp_path, line), tmp_path / "data") as prometheus:
        time.sleep(3)  # some scrapes of a gateway that nobody has asked yet
        children = psutil.Process().children(recursive=True)
        core = next(child for child in children if "backend_engine.core.process" in child.cmdline())
        crowd = Load(line.base_url, keys=dict.fromkeys(("free", "other", "limited"), line.key), models=line.models,
                     seconds=WITHIN_SECONDS, users=30)  # fmt: skip
        thread = threading.Thread(target=crowd.run)
        core.suspend()
        try:
            thread.start()
            fires_within(prometheus, "TokenlineSloBurnFast", WITHIN_SECONDS)
            ended = prometheus.instant('sum(tokenline_requests_total{outcome="ok"})', time.time())
            assert ended == []
        finally:
            crowd.stop()
            core.resume()
            thread.join()


@needs_prometheus
def test_a_queue_that_is_too_long_wakes_somebody_and_leads_to_the_request(tmp_path: Path) -> None:
    with temporary_line() as line, running_prometheus(configured(tmp_path, line), tmp_path / "data") as prometheus:
        start = time.time()
        keys = dict.fromkeys(("free", "other", "limited"), line.key)
        # First a few users that all find a slot, so that there is something usual; then far more than slots.
        Load(line.base_url, keys=keys, models=line.models, seconds=15, users=2).run()
        assert firing(prometheus, "TokenlineTtftP95High") is None
        crowd = Load(line.base_url, keys=keys, models=line.models, seconds=WITHIN_SECONDS, users=24)
        thread = threading.Thread(target=crowd.run)
        thread.start()
        try:
            annotations = fires_within(prometheus, "TokenlineTtftP95High", WITHIN_SECONDS)
        finally:
            crowd.stop()
            thread.join()
        assert annotations["dominant_stage"].startswith("engine_queue (+"), annotations
        trace_id = exemplar_traces(prometheus, f"{FIGURES['ttft']}_bucket", start, time.time())[0]
        bearer = {"authorization": f"Bearer {line.admin_key}"}
        page = httpx.get(f"{line.ops_url}/console/requests/{trace_id}", headers=bearer, trust_env=False)
        assert page.status_code == 200
        assert "engine_queue" in page.text
        told = subprocess.run(
            [TOKENLINE, "why", trace_id, "--json", "--ops-url", line.ops_url],
            env={"TOKENLINE_ADMIN_KEY": line.admin_key, "TOKENLINE_STATE_DIR": str(tmp_path), "PATH": ""},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert told.returncode == 0, told.stderr
        assert trace_id in told.stdout
        assert json.loads(told.stdout)
