"""The Helm chart, as far as it can be read without Helm; `make deploy-check` renders it."""

from __future__ import annotations

import json
import re
import tomllib
from typing import Any

import yaml
from deploy_rig import CHART, PROJECT, ROOT, chart_references, chart_variables, unknown_variables

from backend_engine.app import OPEN_PATHS
from cli.instance import ENGINE_GRACE_SECONDS, GRACE_SECONDS
from gateway.app import build_app
from settings.loader import load_settings
from settings.schema import ServerSettings
from tracing.metrics import CATALOGUE
from tracing.observer.app import ops_app

VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
TEMPLATES = {file.name: file.read_text() for file in (CHART / "templates").iterdir()}


def test_templates_read_values_that_are_there_and_every_value_is_read() -> None:
    read = set()
    for template, path in chart_references():
        value: Any = VALUES
        for name in path:
            assert name in value, (template, ".".join(path))
            value = value[name]
        read.add(path)
    for section, value in VALUES.items():
        names = (
            [(section, key) for key in value] if isinstance(value, dict) and section in ("engine", "secrets") else []
        )
        for path in names or [(section,)]:
            assert any(known[: len(path)] == path for known in read), path


def test_the_schema_knows_every_value_and_closes_every_section() -> None:
    def compare(values: dict[str, Any], schema: dict[str, Any], where: str) -> None:
        assert schema["additionalProperties"] is False, where
        assert set(values) <= set(schema["properties"]), where
        for name, value in values.items():
            inner = schema["properties"][name]
            if isinstance(value, dict) and "properties" in inner:
                compare(value, inner, f"{where}.{name}")

    compare(VALUES, SCHEMA, "values")


def test_variables_that_the_chart_sets_are_settings() -> None:
    assert chart_variables()
    assert unknown_variables(dict.fromkeys(chart_variables(), "x")) == []


def test_the_default_configuration_loads() -> None:
    text = VALUES["config"]
    assert tomllib.loads(text)["server"]["queue_size"] > 0  # what the autoscaler looks at
    assert load_settings(environ={}).settings.server.queue_size == 0


def test_ports_and_probes_are_those_of_the_listeners() -> None:
    server = ServerSettings()
    gateway, engine = TEMPLATES["gateway.yaml"], TEMPLATES["engine.yaml"]
    for name, port in (("http", server.port), ("ops", server.ops_port), ("otlp", server.otlp_port)):
        assert f"{{name: {name}, containerPort: {port}}}" in gateway
    probes = re.findall(r"(\w+)Probe:\n\s+httpGet: \{path: (/\w+), port: (\w+)", gateway)
    assert probes == [("startup", "/readyz", "ops"), ("readiness", "/readyz", "ops"), ("liveness", "/healthz", "http")]
    routes = {route.path for route in build_app(None, "http://x/api").routes}  # type: ignore[arg-type,attr-defined]
    assert "/healthz" in routes
    observer = ops_app(None, None, admin_key_hash=b"")  # type: ignore[arg-type]
    assert {"/readyz", "/metrics"} <= set(observer.openapi()["paths"])
    assert set(re.findall(r"httpGet: \{path: (/\w+)", engine)) == {"/health"} <= OPEN_PATHS


def test_the_autoscaler_asks_for_gauges_that_exist() -> None:
    gauges = {metric.name for metric in CATALOGUE if metric.kind == "gauge"}
    asked = set(re.findall(r"metric: \{name: (\w+)\}", TEMPLATES["scaling.yaml"]))
    assert asked == {"tokenline_queue_depth", "tokenline_inflight_requests"} <= gauges


def test_there_is_time_to_drain() -> None:
    extra = re.compile(r"terminationGracePeriodSeconds: \{\{ add .Values.preStopSeconds [.\w]+drainSeconds (\d+) \}\}")
    for name in ("gateway.yaml", "engine.yaml"):
        assert int(extra.search(TEMPLATES[name])[1]) >= ENGINE_GRACE_SECONDS + GRACE_SECONDS  # type: ignore[index]


def test_rules_and_dashboards_in_the_chart_are_the_projects_own() -> None:
    assert (CHART / "files" / "rules").resolve() == ROOT / "dashboards" / "prometheus" / "rules"
    assert (CHART / "files" / "dashboards").resolve() == ROOT / "dashboards" / "grafana" / "dashboards"


def test_the_charts_version_is_the_projects() -> None:
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == PROJECT["project"]["version"]
