"""A dashboard: rows of panels, the variables they are chosen by, links and annotations."""

from __future__ import annotations

from typing import Any

import msgspec

from dashboards.grafana.panel import DATASOURCE, Panel, Row, panels_json
from dashboards.sources import Places

SCHEMA_VERSION = 39
"""Grafana 11; older schemas are migrated when they are read, newer Grafanas read this one."""
MODEL, UPSTREAM, SURFACE = 'model=~"$model"', 'upstream=~"$upstream"', 'surface=~"$surface"'
ROUTE = (MODEL, UPSTREAM, SURFACE)
_TITLES = {
    "tokenline-overview": "Overview",
    "tokenline-time": "Where the time goes",
    "tokenline-engine": "Engine",
    "tokenline-tenants": "Tenants",
}


class Board(msgspec.Struct, frozen=True):
    """One dashboard. `uid` is what alerts link to."""

    uid: str
    description: str
    rows: tuple[Row, ...]

    @property
    def title(self) -> str:
        return f"Tokenline: {_TITLES[self.uid]}"

    @property
    def panels(self) -> list[Panel]:
        """Every panel, from the top."""
        return [panel for row in self.rows for panel in row.panels]


def board_json(board: Board, places: Places) -> dict[str, Any]:
    """The dashboard as Grafana's JSON."""
    return {
        "uid": board.uid,
        "title": board.title,
        "description": board.description,
        "tags": ["tokenline"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "timezone": "browser",
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "annotations": {"list": [_alerts_annotation()]},
        "links": _links(board, places),
        "templating": {"list": [_datasource(), *(_variable(name) for name in ("model", "upstream", "surface"))]},
        "panels": panels_json(board.rows),
    }


def _links(board: Board, places: Places) -> list[dict[str, Any]]:
    common = {"icon": "external link", "includeVars": False, "keepTime": False, "tags": [], "targetBlank": True}
    others = [
        {"type": "link", "title": title, "url": f"/d/{uid}", **common}
        | {"icon": "dashboard", "includeVars": True, "keepTime": True, "targetBlank": False}
        for uid, title in _TITLES.items()
        if uid != board.uid
    ]
    return [*others, {"type": "link", "title": "Requests (console)", "url": places.console, **common}]


def _datasource() -> dict[str, Any]:
    return {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "current": {},
        "hide": 0,
        "multi": False,
        "includeAll": False,
        "regex": "",
        "refresh": 1,
        "options": [],
    }


def _variable(label: str) -> dict[str, Any]:
    query = f"label_values(tokenline_requests_total, {label})"
    return {
        "name": label,
        "label": label.capitalize(),
        "type": "query",
        "datasource": DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": "PrometheusVariableQueryEditor-VariableQuery"},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "hide": 0,
        "regex": "",
        "options": [],
    }


def _alerts_annotation() -> dict[str, Any]:
    return {
        "name": "Alerts",
        "datasource": DATASOURCE,
        "enable": True,
        "hide": False,
        "iconColor": "red",
        "expr": 'ALERTS{alertname=~"Tokenline.+",alertstate="firing"}',
        "titleFormat": "{{alertname}}",
        "textFormat": "{{model}} {{upstream}} {{instance}}",
        "step": "60s",
    }
