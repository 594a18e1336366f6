"""Prometheus's configuration and rule files, as text by path."""

from __future__ import annotations

from typing import Any

from dashboards.prometheus.alerts import Alert, rule_of
from dashboards.prometheus.engine_alerts import engine_alerts
from dashboards.prometheus.gateway_alerts import gateway_alerts
from dashboards.prometheus.latency_alerts import latency_alerts
from dashboards.prometheus.promql import Windows
from dashboards.prometheus.recording import recording_groups
from dashboards.sources import JOB, Places
from dashboards.yaml import yaml_text
from settings.schema import Settings

SCRAPE_SECONDS = 15


def alert_groups(settings: Settings, windows: Windows) -> dict[str, list[Alert]]:
    """Every alert by the name of its group."""
    groups = {
        "tokenline-objectives": latency_alerts(settings, windows),
        "tokenline-engine": engine_alerts(settings, windows),
        "tokenline-gateway": gateway_alerts(windows),
    }
    return {name: alerts for name, alerts in groups.items() if alerts}


def prometheus_files(settings: Settings, places: Places, windows: Windows) -> dict[str, str]:
    """Path -> text. The recording rules are read first: alerts are judged by them."""
    alerts: list[dict[str, Any]] = [
        {"name": name, "rules": [rule_of(alert, places, windows) for alert in group]}
        for name, group in alert_groups(settings, windows).items()
    ]
    return {
        "prometheus/prometheus.yml": yaml_text(scrape_configuration(places)),
        "prometheus/rules/tokenline-recording.yml": yaml_text({"groups": recording_groups(windows)}),
        "prometheus/rules/tokenline-alerts.yml": yaml_text({"groups": alerts}),
    }


def scrape_configuration(places: Places, *, seconds: float = SCRAPE_SECONDS) -> dict[str, Any]:
    """For Prometheus 2.42 and newer. Exemplars are stored with `--enable-feature=exemplar-storage`."""
    every = f"{round(seconds * 1000)}ms" if seconds != round(seconds) else f"{seconds:g}s"
    timeout = min(10.0, seconds)
    found: dict[str, Any] = {
        "global": {"scrape_interval": every, "scrape_timeout": f"{timeout:g}s", "evaluation_interval": every},
        "rule_files": ["rules/*.yml"],
        "scrape_configs": [{"job_name": JOB, "static_configs": [{"targets": list(places.targets)}]}],
    }
    if places.alertmanagers:
        found["alerting"] = {"alertmanagers": [{"static_configs": [{"targets": list(places.alertmanagers)}]}]}
    return found
