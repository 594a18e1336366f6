"""Helm renders the chart, Kubernetes' schemas take it, and Tokenline can start with what it gives."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from deploy_rig import CHART, ROOT, image_environment, with_secrets

from settings.checks import check_answerable, check_startable
from settings.loader import load_settings

KUBERNETES = "1.37"
SECRETS = {"secrets": {"adminKey": "admin", "otlpToken": "token", "redisUrl": "redis://redis:6379", "apiKey": "sk-1"}}
UPSTREAM = """
[[upstreams]]
name = "vllm"
url = "http://vllm:8000/v1"
[[models]]
name = "llama"
targets = [{ upstream = "vllm" }]
"""
ONE = {**SECRETS, "replicas": 1, "config": UPSTREAM, "persistence": {"enabled": False}}
MANY = {
    **SECRETS,
    "redis": {"enabled": True},
    "tls": {"secretName": "certificate"},
    "autoscaling": {"enabled": True},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "prometheusRule": {"enabled": True},
    "grafanaDashboards": {"enabled": True},
    "engine": {"enabled": True, "replicas": 2, "settings": {"TOKENLINE_SCHEDULER__MAX_NUM_SEQS": "64"}},
    "extraEnv": [{"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": "http://collector:4318"}],
    "networkPolicy": {"tenantFrom": [{"namespaceSelector": {"matchLabels": {"apps": "yes"}}}]},
    "nodeSelector": {"disk": "ssd"},
    "podAnnotations": {"note": "x"},
}
DOCUMENTED = re.search(r"```yaml\n(image: .+?)```", (ROOT / "docs" / "deployment.md").read_text(), re.DOTALL)
ONE_WITH_ENGINE = {**SECRETS, "replicas": 1, "engine": {"enabled": True, "device": "simulated"}}
REFUSED = {
    "share keys and limits by Redis": {**SECRETS, "config": UPSTREAM},
    "nothing could answer": {**SECRETS, "replicas": 1},
    "secrets.apiKey is empty": {"replicas": 1, "config": UPSTREAM},
    "secrets.adminKey is empty": {"replicas": 1, "config": UPSTREAM, "secrets": {"apiKey": "c"}},
    "redis.enabled is true": {
        **ONE,
        "redis": {"enabled": True},
        "secrets": {"adminKey": "a", "otlpToken": "b", "apiKey": "c"},
    },
    "additional properties 'replica' not allowed": {**ONE, "replica": 1},
    "at '/image/tag'": {**ONE, "image": {"tag": "latest"}},
}


@pytest.fixture(scope="module")
def rendered(tool: Callable[[str], str]) -> list[dict[str, Any]]:
    assert DOCUMENTED is not None
    cases = [ONE, MANY, ONE_WITH_ENGINE, yaml.safe_load(DOCUMENTED[1]), *REFUSED.values()]
    asked = json.dumps({"chart": str(CHART), "kubernetes": KUBERNETES, "cases": cases})
    script = Path(__file__).with_name("render.py")
    done = subprocess.run([tool("python3"), str(script)], input=asked, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def by_kind(case: dict[str, Any], kind: str) -> dict[str, dict[str, Any]]:
    return {found["metadata"]["name"]: found for found in case["documents"] if found["kind"] == kind}


def test_kubernetes_takes_what_helm_makes(rendered: list[dict[str, Any]]) -> None:
    for case in rendered[:4]:
        assert case["faults"] == []
    kinds = {document["kind"] for document in rendered[1]["documents"]}
    assert kinds == {
        "ConfigMap", "HorizontalPodAutoscaler", "NetworkPolicy", "PodDisruptionBudget", "PrometheusRule", "Secret",
        "Service", "ServiceMonitor", "StatefulSet",
    }  # fmt: skip


def test_what_would_not_work_is_refused_with_the_reason(rendered: list[dict[str, Any]]) -> None:
    for reason, case in zip(REFUSED, rendered[4:], strict=True):
        assert reason in case["refused"]


@pytest.mark.parametrize("number", [0, 1, 2])
def test_the_gateway_can_start_with_what_the_chart_gives(
    rendered: list[dict[str, Any]], number: int, tmp_path: Path
) -> None:
    case = rendered[number]
    (container,) = by_kind(case, "StatefulSet")["demo-tokenline"]["spec"]["template"]["spec"]["containers"]
    environ = {**image_environment(), **{entry["name"]: entry["value"] for entry in container["env"]}}
    environ = with_secrets(environ, tmp_path)
    for name in ("TOKENLINE_SERVER__TLS_CERT", "TOKENLINE_SERVER__TLS_KEY"):
        if name in environ:
            file = tmp_path / Path(environ[name]).name
            file.write_text("PEM")
            environ[name] = str(file)
    toml = tmp_path / "tokenline.toml"
    toml.write_text(by_kind(case, "ConfigMap")["demo-tokenline"]["data"]["tokenline.toml"])
    loaded = load_settings(toml, environ)
    check_answerable(loaded.settings)
    check_startable(loaded.settings, environ)
    assert loaded.notes == ()
    secret = by_kind(case, "Secret")["demo-tokenline-secrets"]["stringData"]
    mounted = {entry["value"].rsplit("/", 1)[1] for entry in container["env"] if entry["name"].endswith("_FILE")}
    assert mounted <= set(secret)


def test_gateways_balance_over_every_engine_and_engines_start(rendered: list[dict[str, Any]], tmp_path: Path) -> None:
    toml = tmp_path / "tokenline.toml"
    toml.write_text(by_kind(rendered[1], "ConfigMap")["demo-tokenline"]["data"]["tokenline.toml"])
    settings = load_settings(toml, {}).settings
    assert len(settings.upstreams) == len(settings.models[0].targets) == 2
    service = by_kind(rendered[1], "Service")["demo-tokenline-engine"]
    assert service["spec"]["clusterIP"] == "None"
    for case, spans in ((rendered[1], False), (rendered[2], True)):
        engine = by_kind(case, "StatefulSet")["demo-tokenline-engine"]
        environ = {
            entry["name"]: entry["value"] for entry in engine["spec"]["template"]["spec"]["containers"][0]["env"]
        }
        loaded = load_settings(environ=with_secrets({**image_environment(), **environ}, tmp_path))
        assert loaded.settings.engine_model_name == "smollm2"
        assert (loaded.settings.server.otlp_host == "demo-tokenline-ops") is spans


def test_pods_run_with_nothing_that_they_do_not_need(rendered: list[dict[str, Any]]) -> None:
    for stateful in (*by_kind(rendered[1], "StatefulSet").values(), *by_kind(rendered[0], "StatefulSet").values()):
        pod = stateful["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["automountServiceAccountToken"] is False
        (container,) = pod["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
        }  # fmt: skip
        drain = int(
            dict((entry["name"], entry["value"]) for entry in container["env"])["TOKENLINE_SERVER__DRAIN_SECONDS"]
        )
        sleep = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
        assert pod["terminationGracePeriodSeconds"] >= sleep + drain + 15


def test_the_ops_port_is_apart_from_the_tenants(rendered: list[dict[str, Any]]) -> None:
    policy = by_kind(rendered[0], "NetworkPolicy")["demo-tokenline"]["spec"]
    callers = {rule["ports"][0]["port"]: rule.get("from") for rule in policy["ingress"]}
    assert callers["http"] is None
    assert callers["ops"] == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    assert callers["otlp"] == [{"podSelector": {}}]
    tenants = by_kind(rendered[0], "Service")["demo-tokenline"]["spec"]["ports"]
    assert [port["name"] for port in tenants] == ["http"]


def test_the_operators_rules_are_good_rules(
    rendered: list[dict[str, Any]], program: Callable[[str, str], str], tmp_path: Path
) -> None:
    rule = by_kind(rendered[1], "PrometheusRule")["demo-tokenline"]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump(rule["spec"]))
    checked = subprocess.run(
        [program("promtool", "prometheus"), "check", "rules", str(file)], capture_output=True, text=True, timeout=60
    )
    assert checked.returncode == 0, checked.stderr
    monitor = by_kind(rendered[1], "ServiceMonitor")["demo-tokenline"]["spec"]
    service = by_kind(rendered[1], "Service")["demo-tokenline-ops"]["metadata"]["labels"]
    assert service[monitor["jobLabel"]] == "tokenline"
    assert monitor["selector"]["matchLabels"].items() <= service.items()
