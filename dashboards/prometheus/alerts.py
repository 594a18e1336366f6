"""What an alert is: a signal, when it is too much, for how long, and where to look then."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from dashboards.prometheus.promql import Windows
from dashboards.prometheus.recording import SLOW_EXCESS
from dashboards.sources import Places

Severity = Literal["page", "ticket"]
Scope = Literal["model", "all"]
MIN_REQUESTS = 20
"""Below this many in its window a share or a percentile says nothing, and nobody is woken."""


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """One alerting rule. `signal` is the number that is judged; `expr` is empty unless it is too much."""

    name: str
    signal: str
    expr: str
    hold_seconds: float
    severity: Severity
    summary: str
    """A template: `$labels` and `$value` are the signal's."""
    description: str
    dashboard: str
    """uid of the dashboard that shows the signal."""
    scope: Scope = "model"
    """Of which requests the dominant stage is told: those of the alert's model, or all."""
    labels: dict[str, str] = {}
    silent_when_well: str = ""
    """Why the signal has no series while all is well; empty where it always has some."""


def rule_of(alert: Alert, places: Places, windows: Windows) -> dict[str, Any]:
    """The alert as Prometheus wants it written."""
    rule: dict[str, Any] = {"alert": alert.name, "expr": alert.expr}
    if alert.hold_seconds:
        rule["for"] = windows(alert.hold_seconds)
    return {
        **rule,
        "labels": {"severity": alert.severity, **alert.labels},
        "annotations": {
            "summary": alert.summary,
            "description": alert.description,
            "dominant_stage": dominant_stage(alert.scope),
            "dashboard_url": f"{places.grafana}/d/{alert.dashboard}{_VARIABLES[alert.scope]}",
            "console_url": places.console,
            "runbook_url": f"{places.runbooks}/{alert.name}.md",
        },
    }


_VARIABLES = {"model": "?var-model={{ $labels.model | urlquery }}", "all": ""}


def dominant_stage(scope: Scope) -> str:
    """A template that asks which stage the slowest 5 % spend most time in beyond the fast half."""
    if scope == "model":
        asked = f"printf `topk(1, {SLOW_EXCESS}{{model=%q}} > 0)` $labels.model"
    else:
        asked = f"`topk(1, max by (stage) ({SLOW_EXCESS}) > 0)`"
    return (
        f"{{{{ with {asked} | query }}}}"
        '{{ . | first | label "stage" }} (+{{ . | first | value | humanizeDuration }} in the slowest 5 %)'
        "{{ else }}unknown: no slow band in the last 10 minutes{{ end }}"
    )
