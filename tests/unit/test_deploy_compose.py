"""The compose file: settings that are settings, addresses that meet, nothing open that need not be."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from deploy_rig import COMPOSE, DEPLOY, ROOT, compose, image_environment, unknown_variables, with_secrets
from typer.main import get_command

from backend_engine.app import OPEN_PATHS
from cli.instance import ENGINE_GRACE_SECONDS, GRACE_SECONDS
from cli.main import app
from dashboards.grafana.files import grafana_files
from dashboards.sources import JOB, default_places
from settings.checks import check_answerable, check_startable
from settings.loader import load_settings
from settings.schema import ServerSettings, Settings


@pytest.fixture
def services() -> dict[str, Any]:
    return compose("compose.yaml", "compose.cuda.yaml")


def environment(services: dict[str, Any], service: str, folder: Path) -> dict[str, str]:
    return with_secrets({**image_environment(), **services[service]["environment"]}, folder)


def test_the_gateway_can_start_with_what_it_is_given(services: dict[str, Any], tmp_path: Path) -> None:
    environ = environment(services, "gateway", tmp_path)
    loaded = load_settings(COMPOSE / "config" / "tokenline.toml", environ)
    check_answerable(loaded.settings)
    check_startable(loaded.settings, environ)
    assert loaded.notes == ()
    server = loaded.settings.server
    assert (server.host, server.ops_host, server.otlp_host) == ("0.0.0.0", "0.0.0.0", "0.0.0.0")
    assert not loaded.settings.has_engine
    assert loaded.settings.redis.url is not None
    (route,) = loaded.settings.models
    assert route.name == services["engine"]["environment"]["TOKENLINE_ENGINE__SERVED_NAME"]
    assert loaded.settings.upstreams[0].url == f"http://engine:{ServerSettings().port}/v1"


def test_the_engine_sends_its_spans_to_the_gateway_with_the_gateways_token(
    services: dict[str, Any], tmp_path: Path
) -> None:
    gateway = load_settings(COMPOSE / "config" / "tokenline.toml", environment(services, "gateway", tmp_path)).settings
    loaded = load_settings(environ=environment(services, "engine", tmp_path))
    assert loaded.notes == ()
    assert loaded.settings.otlp_endpoint == f"http://gateway:{gateway.server.otlp_port}/v1/traces"
    assert loaded.settings.server.otlp_token == gateway.server.otlp_token
    assert loaded.settings.engine.device == "cuda"


def test_variables_are_settings_and_commands_are_verbs(services: dict[str, Any]) -> None:
    verbs = get_command(app).commands  # type: ignore[attr-defined]
    named = {"TOKENLINE_SERVED_NAME"}  # read by tokenline.toml
    for name in ("gateway", "engine"):
        assert set(unknown_variables(services[name]["environment"])) <= named
        assert services[name]["command"][0] in verbs
    assert "${TOKENLINE_SERVED_NAME}" in (COMPOSE / "config" / "tokenline.toml").read_text()


def test_the_engines_health_is_asked_where_it_answers(services: dict[str, Any]) -> None:
    question = services["engine"]["healthcheck"]["test"][-1]
    assert f"'127.0.0.1', {ServerSettings().port}" in question
    assert any(f"'{path}'" in question for path in OPEN_PATHS)


def test_ports_are_published_on_loopback(services: dict[str, Any]) -> None:
    published = [port for keys in services.values() for port in keys.get("ports", [])]
    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_all_services_are_hardened_and_those_that_can_be_asked_are(services: dict[str, Any]) -> None:
    without_shell = {"collector", "tempo", "tempo-volume"}
    for name, keys in services.items():
        assert keys["cap_drop"] == ["ALL"], name
        if name != "tempo-volume":
            assert keys["read_only"], name
            assert keys["security_opt"] == ["no-new-privileges:true"], name
        built_in = name == "gateway"  # HEALTHCHECK of the image
        assert ("healthcheck" in keys) == (name not in without_shell and not built_in), name


def test_there_is_time_to_drain(services: dict[str, Any]) -> None:
    needed = ServerSettings().drain_seconds + max(ENGINE_GRACE_SECONDS, 2 * GRACE_SECONDS)
    for name in ("gateway", "engine"):
        assert float(services[name]["stop_grace_period"].removesuffix("s")) >= needed


def test_prometheus_scrapes_gateway_and_engine_under_the_names_that_rules_rely_on(services: dict[str, Any]) -> None:
    config = yaml.safe_load((COMPOSE / "prometheus.yml").read_text())
    targets = {job["job_name"]: job["static_configs"][0]["targets"] for job in config["scrape_configs"]}
    server = ServerSettings()
    assert targets[JOB] == [f"gateway:{server.ops_port}"]
    assert targets[f"{JOB}-engine"] == [f"engine:{server.port}"]
    hosts = {target.partition(":")[0] for found in targets.values() for target in found} - {"127.0.0.1"}
    assert hosts <= set(services)
    assert "/metrics" in OPEN_PATHS
    assert "../../dashboards/prometheus/rules:/etc/prometheus/rules:ro" in services["prometheus"]["volumes"]


def test_data_sources_are_those_that_the_dashboards_are_built_with() -> None:
    import msgspec

    places = default_places(Settings(state_dir=Path("unused")))
    places = msgspec.structs.replace(places, tempo="http://tempo:3200")
    files = grafana_files(places, prometheus_url="http://prometheus:9090")
    built = yaml.safe_load(files["grafana/provisioning/datasources/tokenline.yml"])
    assert yaml.safe_load((COMPOSE / "grafana" / "datasources.yml").read_text()) == built


def test_every_file_that_is_mounted_is_there_or_made(services: dict[str, Any], tmp_path: Path) -> None:
    for name in ("compose", "collector"):
        (tmp_path / name).mkdir()
    script = tmp_path / "compose" / "make-secrets.sh"
    script.write_text((COMPOSE / "make-secrets.sh").read_text())
    first = subprocess.run(["sh", str(script)], check=True, capture_output=True, text=True)
    made = {file.name: file.read_text() for file in (tmp_path / "compose" / "secrets").iterdir()}
    subprocess.run(["sh", str(script)], check=True, capture_output=True)
    assert {file.name: file.read_text() for file in (tmp_path / "compose" / "secrets").iterdir()} == made
    assert not [value for value in made.values() if value in first.stdout]
    assert made["redis-url"] == f"redis://:{made['redis-password']}@redis:6379/0"
    assert made["collector.env"] == f"TOKENLINE_OTLP_TOKEN={made['otlp-token']}\n"
    assert (tmp_path / "compose" / "secrets").stat().st_mode & 0o777 == 0o700

    secrets = yaml.safe_load((COMPOSE / "compose.yaml").read_text())["secrets"]
    assert {Path(secret["file"]).name for secret in secrets.values()} | {"collector.env"} == set(made)
    for keys in services.values():
        for volume in keys.get("volumes", []):
            source = volume.split(":")[0]
            assert not source.startswith(".") or (COMPOSE / source).resolve().exists(), source
        for file in keys.get("env_file", []):
            assert not isinstance(file, str) or Path(file).name in made


def test_nothing_of_the_secrets_can_be_committed() -> None:
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert "deploy/compose/secrets/" in ignored
    assert "deploy/compose/upstream-keys.env" in ignored
    assert not (set((DEPLOY / "compose").iterdir()) & {COMPOSE / ".env"})
