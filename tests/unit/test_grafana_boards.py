"""Dashboards as data: what is wrong with them is found, and nothing is; every metric is shown somewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from dashboards.checks.questions import lint, panel_questions, rule_questions
from dashboards.files import all_files
from dashboards.grafana.board import board_json
from dashboards.grafana.files import boards, grafana_files
from dashboards.grafana.lint import board_faults, expression_faults
from dashboards.prometheus.files import alert_groups
from dashboards.prometheus.promql import Windows
from dashboards.prometheus.recording import recording_groups
from dashboards.sources import Places, default_places
from settings.schema import Settings
from tracing.metrics import CATALOGUE

ROOT = Path(__file__).parents[2]
NO_SCALE = Windows()
DEFAULTS = Settings(state_dir=Path("/nowhere"))
PLACES = default_places(DEFAULTS)


def broken(change: Any) -> list[str]:
    """Faults of the overview after a change to its JSON."""
    board = json.loads(json.dumps(board_json(boards(PLACES)[0], PLACES)))
    change(board)
    return list(board_faults(board, frozenset()))


def first_panel(board: dict[str, Any]) -> dict[str, Any]:
    return next(panel for panel in board["panels"] if panel["type"] == "timeseries")


def first_query(expr: str) -> Any:
    return lambda board: first_panel(board)["targets"][0].update(expr=expr)


def test_nothing_is_wrong_with_dashboards_and_rules() -> None:
    assert lint(DEFAULTS, PLACES, NO_SCALE) == []
    assert broken(lambda board: None) == []


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda board: first_panel(board).pop("title"), "has no title"),
        (lambda board: first_panel(board).pop("description"), "has no description"),
        (lambda board: first_panel(board)["fieldConfig"]["defaults"].pop("unit"), "has no unit"),
        (lambda board: first_panel(board).update(datasource={"uid": "abc"}), "has a fixed data source"),
        (lambda board: first_panel(board).update(type="graph"), "type 'graph' is not one of"),
        (lambda board: first_panel(board).update(targets=[]), "has no query"),
        (lambda board: board["templating"]["list"].pop(), "variables are"),
        (lambda board: board["panels"][1].update(id=board["panels"][2]["id"]), "two panels have one id"),
        (lambda board: board["panels"][1]["gridPos"].update(w=20), "lies over"),
        (lambda board: board.pop("schemaVersion"), "schemaVersion must be a int"),
        (lambda board: board.update(uid="x" * 41), "uid is longer"),
        (first_query("rate(tokenline_requests_totals[$__rate_interval])"), "not in the metrics catalogue"),
        (first_query("rate(tokenline_requests_total[5m])"), "does not follow the time range"),
        (first_query("tokenline_requests_total"), "belongs inside rate() or increase()"),
        (first_query("rate(tokenline_queue_depth[$__rate_interval])"), "is a gauge: it has no rate"),
        (first_query("model:nothing:p95"), "no rule records model:nothing:p95"),
        (first_query("increase(tokenline_requests_total[$__range])"), "draws a line of [$__range]"),
        (
            first_query("tokenline_prompt_tokens_sum / tokenline_prompt_tokens_count"),
            "tokenline_prompt_tokens_sum counts since the start",
        ),
    ],
)
def test_what_is_wrong_is_found(change: Any, fault: str) -> None:
    assert any(fault in found for found in broken(change))


def test_names_inside_strings_are_no_metrics() -> None:
    assert list(expression_faults('tokenline_queue_depth{a="tokenline_no_such"}', frozenset(), panel=True)) == []


def test_every_metric_is_on_a_panel_or_in_a_rule() -> None:
    asked = [question.expr for question in (*panel_questions(PLACES), *rule_questions(DEFAULTS, NO_SCALE))]
    asked += [rule["expr"] for group in recording_groups(NO_SCALE) for rule in group["rules"]]
    text = "\n".join(asked)
    assert [metric.name for metric in CATALOGUE if metric.name not in text] == []


def test_every_alert_and_panel_links_to_a_dashboard_that_exists() -> None:
    uids = {board.uid for board in boards(PLACES)}
    alerts = [alert for group in alert_groups(DEFAULTS, NO_SCALE).values() for alert in group]
    assert {alert.dashboard for alert in alerts} <= uids
    for board in boards(PLACES):
        links = [link["url"] for link in board_json(board, PLACES)["links"]]
        assert set(links) == {f"/d/{uid}" for uid in uids - {board.uid}} | {PLACES.console}


def test_an_exemplar_leads_to_its_request_and_to_tempo_where_there_is_one() -> None:
    places = Places(PLACES.console, PLACES.grafana, PLACES.runbooks, PLACES.targets, (), tempo="http://tempo:3200")
    for given, count in ((PLACES, 1), (places, 2)):
        sources = yaml.safe_load(grafana_files(given)["grafana/provisioning/datasources/tokenline.yml"])["datasources"]
        assert len(sources) == count
        destinations = sources[0]["jsonData"]["exemplarTraceIdDestinations"]
        assert destinations[0]["url"] == f"{PLACES.console}/requests/$${{__value.raw}}"
        uids = {source["uid"] for source in sources}
        assert {destination.get("datasourceUid") for destination in destinations[1:]} <= uids


def test_what_is_checked_in_is_what_the_defaults_make() -> None:
    made = all_files(DEFAULTS, PLACES, NO_SCALE)
    stale = [name for name, text in made.items() if (ROOT / "dashboards" / name).read_text() != text]
    assert stale == [], "run: tokenline dashboards build"
    kept = {
        str(path.relative_to(ROOT / "dashboards"))
        for room in ("prometheus", "grafana")
        for path in (ROOT / "dashboards" / room).rglob("*")
        if path.suffix in (".yml", ".json")
    }
    assert kept == set(made)


def test_yaml_is_read_back_as_it_was_meant() -> None:
    for name, text in all_files(DEFAULTS, PLACES, NO_SCALE).items():
        if name.endswith(".yml"):
            assert isinstance(yaml.safe_load(text), dict)
