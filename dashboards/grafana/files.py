"""Grafana's dashboards and provisioning, as text by path."""

from __future__ import annotations

import json
from typing import Any

from dashboards.grafana.board import Board, board_json
from dashboards.grafana.engine import engine
from dashboards.grafana.overview import overview
from dashboards.grafana.tenants import tenants
from dashboards.grafana.time import where_the_time_goes
from dashboards.sources import Places
from dashboards.yaml import yaml_text

FOLDER = "/var/lib/grafana/dashboards/tokenline"
"""Where the JSON files lie on Grafana's machine."""
PROMETHEUS_URL = "http://127.0.0.1:9090"


def boards(places: Places) -> tuple[Board, ...]:
    """All dashboards."""
    return (overview(), where_the_time_goes(), engine(), tenants(places))


def grafana_files(places: Places, *, prometheus_url: str = PROMETHEUS_URL) -> dict[str, str]:
    """Path -> text."""
    files = {
        f"grafana/dashboards/{board.uid}.json": json.dumps(board_json(board, places), indent=1, ensure_ascii=False)
        + "\n"
        for board in boards(places)
    }
    files["grafana/provisioning/datasources/tokenline.yml"] = yaml_text(_datasources(places, prometheus_url))
    files["grafana/provisioning/dashboards/tokenline.yml"] = yaml_text(_providers())
    return files


def _datasources(places: Places, prometheus_url: str) -> dict[str, Any]:
    # `$$` is what Grafana's provisioning reads as `$`.
    destinations: list[dict[str, Any]] = [
        {
            "name": "trace_id",
            "url": f"{places.console}/requests/$${{__value.raw}}",
            "urlDisplayLabel": "Why was it slow?",
        }
    ]
    found: list[dict[str, Any]] = []
    if places.tempo:
        destinations.append(
            {"name": "trace_id", "datasourceUid": "tokenline-tempo", "urlDisplayLabel": "Trace in Tempo"}
        )
        found.append(
            {"name": "Tempo", "uid": "tokenline-tempo", "type": "tempo", "access": "proxy", "url": places.tempo}
        )
    prometheus = {
        "name": "Prometheus",
        "uid": "tokenline-prometheus",
        "type": "prometheus",
        "access": "proxy",
        "url": prometheus_url,
        "isDefault": True,
        "jsonData": {"httpMethod": "POST", "timeInterval": "15s", "exemplarTraceIdDestinations": destinations},
    }
    return {"apiVersion": 1, "datasources": [prometheus, *found]}


def _providers() -> dict[str, Any]:
    provider: dict[str, Any] = {"name": "tokenline", "type": "file", "folder": "Tokenline", "allowUiUpdates": False}
    return {"apiVersion": 1, "providers": [provider | {"options": {"path": FOLDER}}]}
