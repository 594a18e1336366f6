"""Every query that dashboards and rules ask, with where it stands and whether it may have no result."""

from __future__ import annotations

import msgspec

from dashboards.grafana.board import board_json
from dashboards.grafana.files import boards
from dashboards.grafana.lint import board_faults, expression_faults
from dashboards.prometheus.files import alert_groups
from dashboards.prometheus.promql import Windows
from dashboards.prometheus.recording import recording_groups
from dashboards.sources import Places
from settings.schema import Settings


class Question(msgspec.Struct, frozen=True):
    """One query."""

    place: str
    expr: str
    instant: bool
    legend: str = ""
    may_be_empty: str = ""
    """Why no result is well too; empty where there must be one."""


def panel_questions(places: Places) -> list[Question]:
    """Of every panel."""
    return [
        Question(
            f"{board.title}, {panel.title}", query.expr, query.instant, query.legend, query.silent_when_well
        )
        for board in boards(places)
        for panel in board.panels
        for query in panel.queries
    ]  # fmt: skip


def rule_questions(settings: Settings, windows: Windows) -> list[Question]:
    """Of every rule: what is recorded, each alert's signal, and its condition, which is empty while all is well."""
    found = [
        Question(f"rule {rule['record']}", rule["record"], True)
        for group in recording_groups(windows)
        for rule in group["rules"]
    ]
    for alerts in alert_groups(settings, windows).values():
        for alert in alerts:
            found.append(
                Question(f"alert {alert.name}, signal", alert.signal, True, may_be_empty=alert.silent_when_well)
            )
            found.append(
                Question(f"alert {alert.name}", alert.expr, True, may_be_empty="an alert is empty unless it fires")
            )
    return found


def lint(settings: Settings, places: Places, windows: Windows) -> list[str]:
    """Faults of dashboards and rules as data."""
    groups = recording_groups(windows)
    recorded = frozenset(rule["record"] for group in groups for rule in group["rules"])
    faults = [fault for board in boards(places) for fault in board_faults(board_json(board, places), recorded)]
    expressions = [(rule["record"], rule["expr"]) for group in groups for rule in group["rules"]]
    for alerts in alert_groups(settings, windows).values():
        expressions += [(alert.name, alert.expr) for alert in alerts]
    for name, expression in expressions:
        faults += [f"{name}: {fault}" for fault in expression_faults(expression, recorded, panel=False)]
    return faults
