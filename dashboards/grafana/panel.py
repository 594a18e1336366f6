"""Panels and their queries, as plain records and as Grafana's JSON."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Kind = Literal["timeseries", "stat", "heatmap", "table", "bargauge", "alertlist"]
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
COLUMNS = 24


class Query(msgspec.Struct, frozen=True):
    """One query of a panel."""

    expr: str
    legend: str = ""
    instant: bool = False
    """The whole time range as one number (`$__range`), not a line."""
    exemplars: bool = False
    silent_when_well: str = ""
    """Why it may have no result; empty where a line under load must have some."""


class Panel(msgspec.Struct, frozen=True):
    """What is drawn from some queries. Width and height are in Grafana's grid of 24 columns."""

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...] = ()
    kind: Kind = "timeseries"
    width: int = 8
    height: int = 8
    stacked: bool = False
    maximum: float | None = None
    links: tuple[tuple[str, str], ...] = ()
    """(title, URL) beside those of the dashboard."""


class Row(msgspec.Struct, frozen=True):
    """Panels under a heading, from left to right."""

    title: str
    panels: tuple[Panel, ...]


def panels_json(rows: tuple[Row, ...]) -> list[dict[str, Any]]:
    """Every panel with its place and number."""
    found: list[dict[str, Any]] = []
    top = 0
    for row in rows:
        place = {"x": 0, "y": top, "w": COLUMNS, "h": 1}
        heading = {"type": "row", "title": row.title, "collapsed": False, "panels": [], "gridPos": place}
        found.append({"id": len(found) + 1, **heading})
        top += 1
        left = deepest = 0
        for panel in row.panels:
            if left + panel.width > COLUMNS:
                top, left, deepest = top + deepest, 0, 0
            place = {"x": left, "y": top, "w": panel.width, "h": panel.height}
            found.append({"id": len(found) + 1, "gridPos": place, **_panel_json(panel)})
            left, deepest = left + panel.width, max(deepest, panel.height)
        top += deepest
    return found


def _panel_json(panel: Panel) -> dict[str, Any]:
    found: dict[str, Any] = {"type": panel.kind, "title": panel.title, "description": panel.description}
    if panel.links:
        found["links"] = [{"title": title, "url": url, "targetBlank": True} for title, url in panel.links]
    if panel.kind == "alertlist":
        return found | {"options": _ALERT_LIST}
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0, "custom": _custom(panel)}
    if panel.maximum is not None:
        defaults["max"] = panel.maximum
    return found | {
        "datasource": DATASOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": _OPTIONS[panel.kind],
        "targets": [_target(panel, number, query) for number, query in enumerate(panel.queries)],
        **({"transformations": [_TABLE]} if panel.kind == "table" else {}),
    }


def _target(panel: Panel, number: int, query: Query) -> dict[str, Any]:
    target: dict[str, Any] = {
        "refId": chr(ord("A") + number),
        "datasource": DATASOURCE,
        "editorMode": "code",
        "expr": query.expr,
        "legendFormat": query.legend or "__auto",
        "range": not query.instant,
        "instant": query.instant,
        "exemplar": query.exemplars,
    }
    if panel.kind in ("heatmap", "table"):
        target["format"] = panel.kind
    return target


def _custom(panel: Panel) -> dict[str, Any]:
    if panel.kind != "timeseries":
        return {}
    custom: dict[str, Any] = {"lineWidth": 1, "fillOpacity": 60 if panel.stacked else 5, "showPoints": "never"}
    return custom | {"stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"}}


_CALCULATION = {"calcs": ["lastNotNull"], "fields": "", "values": False}
_OPTIONS: dict[Kind, dict[str, Any]] = {
    "timeseries": {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {"reduceOptions": _CALCULATION, "graphMode": "area", "colorMode": "none", "textMode": "auto"},
    "heatmap": {
        "calculate": False,
        "cellGap": 1,
        "color": {"mode": "scheme", "scheme": "Oranges", "steps": 64, "exponent": 0.5, "scale": "exponential"},
        "exemplars": {"color": "rgba(31,120,193,0.9)"},
        "filterValues": {"le": 1e-9},
        "rowsFrame": {"layout": "auto"},
        "tooltip": {"mode": "single", "yHistogram": True},
        "yAxis": {"axisPlacement": "left", "unit": "s"},
        "legend": {"show": True},
    },
    "table": {"showHeader": True, "cellHeight": "sm", "sortBy": [{"displayName": "Value", "desc": True}]},
    "bargauge": {
        "orientation": "horizontal",
        "displayMode": "basic",
        "reduceOptions": _CALCULATION,
        "showUnfilled": True,
    },
}
_TABLE = {"id": "organize", "options": {"excludeByName": {"Time": True}, "indexByName": {}, "renameByName": {}}}
_ALERT_LIST = {
    "alertName": "Tokenline",
    "alertInstanceLabelFilter": "",
    "datasource": "${datasource}",
    "groupMode": "default",
    "maxItems": 20,
    "sortOrder": 3,
    "stateFilter": {"error": True, "firing": True, "noData": False, "normal": False, "pending": True},
    "viewMode": "list",
}
