"""Rules and alerts: promtool takes them, each alert fires, stays quiet and resolves, and they follow the settings."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml
from promtool_cases import ROUTE, all_cases, slo
from promtool_rig import Case, histogram, level, promtool, ramp, run

from dashboards.prometheus.files import alert_groups, prometheus_files
from dashboards.prometheus.promql import Windows, duration
from dashboards.sources import Places, default_places
from settings.schema import EngineSettings, Settings, SloSettings

DOCS = Path(__file__).parents[2] / "docs"
NO_SCALE = Windows()


def written(folder: Path, settings: Settings, windows: Windows = NO_SCALE, places: Places | None = None) -> list[Path]:
    """The rule files of these settings."""
    paths = []
    for name, text in prometheus_files(settings, places or default_places(settings), windows).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        paths.append(path)
    return [path for path in paths if path.parent.name == "rules"]


@pytest.fixture
def defaults(tmp_path: Path) -> Settings:
    return Settings(state_dir=tmp_path)


def test_promtool_takes_the_configuration_and_every_rule(tmp_path: Path, defaults: Settings) -> None:
    written(tmp_path, defaults)
    configuration = tmp_path / "prometheus" / "prometheus.yml"
    done = subprocess.run([promtool(), "check", "config", str(configuration)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_fires_stays_quiet_and_resolves(tmp_path: Path, defaults: Settings) -> None:
    assert run(tmp_path, written(tmp_path, defaults), all_cases()) == ""


def test_the_table_has_every_alert_firing_resolving_and_staying_quiet(defaults: Settings) -> None:
    names = {alert.name for alerts in alert_groups(defaults, NO_SCALE).values() for alert in alerts}
    cases = all_cases()
    assert {case.alert for case in cases if case.firing and case.quiet} == names
    assert {case.alert for case in cases if not case.firing} == names


def test_a_case_that_is_wrong_is_found_by_promtool(tmp_path: Path, defaults: Settings) -> None:
    wrong = Case("TokenlineNoData", "not while nothing is scraped", {'up{job="other"}': "1x20"}, (), ("10m",))
    assert "TokenlineNoData" in run(tmp_path, written(tmp_path, defaults), [wrong])


BANDS = {
    'tokenline_band_requests_total{model="m",band="p0-50"}': ramp((60, 10)),
    'tokenline_band_requests_total{model="m",band="p99+"}': ramp((60, 1)),
    'tokenline_band_stage_seconds_total{model="m",band="p0-50",stage="engine_queue"}': ramp((60, 1)),
    'tokenline_band_stage_seconds_total{model="m",band="p0-50",stage="engine_prefill"}': ramp((60, 5)),
    'tokenline_band_stage_seconds_total{model="m",band="p99+",stage="engine_queue"}': ramp((60, 2.6)),
    'tokenline_band_stage_seconds_total{model="m",band="p99+",stage="engine_prefill"}': ramp((60, 0.9)),
}
"""A slow request waits 2.5 s longer for the engine than a fast one, and is prefilled 0.4 s longer."""


def test_a_page_says_what_where_and_which_stage_the_slow_ones_spend_their_time_in(
    tmp_path: Path, defaults: Settings
) -> None:
    places = default_places(defaults)
    ttft = "gen_ai_server_time_to_first_token_seconds"
    expected = {
        "exp_labels": {"severity": "page", "model": "m"},
        "exp_annotations": {
            "summary": "TTFT P95 of m is 3.9s",
            "description": "Over 5 minutes and at least 20 samples (gen_ai_server_time_to_first_token_seconds). "
            "Objectives: default: TTFT 2000 ms, TPOT 200 ms, 99 % of requests.",
            "dominant_stage": "engine_queue (+2.5s in the slowest 5 %)",
            "dashboard_url": f"{places.grafana}/d/tokenline-overview?var-model=m",
            "console_url": places.console,
            "runbook_url": "docs/runbooks/TokenlineTtftP95High.md",
        },
    }
    slow = histogram(ttft, ROUTE, (2.0, 4.0), (60, 30, 3.0)) | BANDS
    case = Case("TokenlineTtftP95High", "tells", slow, ("30m",), annotations=expected)
    assert run(tmp_path, written(tmp_path, defaults), [case]) == ""


def test_an_alert_of_all_models_tells_the_stage_too_and_says_so_where_there_is_no_slow_band(
    tmp_path: Path, defaults: Settings
) -> None:
    places = default_places(defaults)
    down = {'up{job="tokenline",instance="g:9464"}': level((60, 0))}
    annotations = {
        "summary": "No metrics from g:9464",
        "description": "The observer's listener can't be scraped: nobody would notice anything else.",
        "dashboard_url": f"{places.grafana}/d/tokenline-overview",
        "console_url": places.console,
        "runbook_url": "docs/runbooks/TokenlineNoData.md",
    }
    labels = {"severity": "page", "job": "tokenline", "instance": "g:9464"}
    cases = [
        Case(
            "TokenlineNoData",
            told,
            down | bands,
            ("30m",),
            annotations={"exp_labels": labels, "exp_annotations": annotations | {"dominant_stage": told}},
        )
        for told, bands in (
            ("engine_queue (+2.5s in the slowest 5 %)", BANDS),
            ("unknown: no slow band in the last 10 minutes", {}),
        )
    ]
    assert run(tmp_path, written(tmp_path, defaults), cases) == ""


def test_each_model_is_held_to_its_own_objective(tmp_path: Path) -> None:
    settings = Settings(
        state_dir=tmp_path,
        slo={"default": SloSettings(), "a.b": SloSettings(ttft_ms=5000), "m": SloSettings(ttft_ms=500)},
    )
    name = "gen_ai_server_time_to_first_token_seconds"

    def slow(model: str) -> dict[str, str]:
        return histogram(name, ROUTE.replace('model="m"', f'model="{model}"'), (0.5, 1.0, 2.0, 4.0), (30, 30, 3.0))

    cases = [
        Case("TokenlineTtftP95High", "3 s is within 5 s", slow("a.b"), (), ("20m",)),
        Case("TokenlineTtftP95High", "the dot in a name is a dot", slow("a-b"), ("20m",)),
        Case(
            "TokenlineTtftP95High", "0.9 s is over 0.5 s", histogram(name, ROUTE, (0.5, 1.0), (30, 30, 0.9)), ("20m",)
        ),
    ]
    assert run(tmp_path, written(tmp_path, settings), cases) == ""


def test_a_generous_target_still_burns_when_everything_is_bad(tmp_path: Path) -> None:
    settings = Settings(state_dir=tmp_path, slo={"default": SloSettings(target=0.9)})
    case = Case("TokenlineSloBurnFast", "all are bad", slo((60, 0, 5)), ("40m",))
    assert run(tmp_path, written(tmp_path, settings), [case]) == ""


def test_shares_of_good_requests_are_recorded_and_percentiles_are_of_the_window(
    tmp_path: Path, defaults: Settings
) -> None:
    groups = yaml.safe_load(written(tmp_path, defaults)[0].read_text())["groups"]
    rules = {rule["record"]: rule["expr"] for group in groups for rule in group["rules"]}
    assert all(name.count(":") == 2 for name in rules)
    for figure in ("time_to_first_token", "time_per_output_token", "request_duration"):
        for quantile in ("p50", "p95", "p99"):
            assert f"rate(gen_ai_server_{figure}_seconds_bucket[5m])" in rules[
                f"model:gen_ai_server_{figure}_seconds:{quantile}_rate5m"
            ]  # fmt: skip


def test_windows_can_be_scaled_down_to_be_seen_in_seconds(tmp_path: Path, defaults: Settings) -> None:
    rules = written(tmp_path, defaults, Windows(0.05))
    case = Case("TokenlineNoData", "fires soon", {'up{job="other"}': "1x20"}, ("6s",), (), "1s")
    assert run(tmp_path, rules, [case]) == ""
    assert [duration(seconds) for seconds in (86400, 5400, 90, 0.25)] == ["1d", "90m", "90s", "250ms"]


def test_another_servers_engine_has_no_alerts_of_ours(tmp_path: Path) -> None:
    settings = Settings(state_dir=tmp_path, engine=EngineSettings(backend="none"))
    assert "tokenline-engine" not in alert_groups(settings, NO_SCALE)


def test_every_alert_has_a_runbook_and_every_runbook_an_alert(defaults: Settings) -> None:
    names = {alert.name for alerts in alert_groups(defaults, NO_SCALE).values() for alert in alerts}
    assert {path.stem for path in (DOCS / "runbooks").glob("*.md")} - {"README"} == names
