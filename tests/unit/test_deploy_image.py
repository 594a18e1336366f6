"""The Dockerfile says what the project says: packages, folders, ports, paths, users."""

from __future__ import annotations

import re

import yaml
from deploy_rig import (
    COMPOSE,
    DOCKERFILE,
    PROJECT,
    ROOT,
    compose,
    docker_args,
    dockerfile,
    image_environment,
    unknown_variables,
)

from settings.schema import ServerSettings

BASE = re.compile(r"^python:3\.\d+\.\d+-slim-[a-z]+$")
PINNED = re.compile(r"^[a-z0-9./-]+:v?\d+\.\d+\.\d+(-[a-z0-9.]+)?$")


def test_the_base_is_pinned_and_new_enough() -> None:
    base = docker_args()["PYTHON_IMAGE"]
    assert BASE.match(base)
    wanted = tuple(int(part) for part in PROJECT["project"]["requires-python"].removeprefix(">=").split("."))
    assert tuple(int(part) for part in base.split(":")[1].split("-")[0].split(".")[:2]) >= wanted


def test_every_image_of_compose_is_pinned_to_a_full_version_or_built_here() -> None:
    for name in ("compose.yaml", "compose.cuda.yaml"):
        for service, keys in yaml.safe_load((COMPOSE / name).read_text())["services"].items():
            if "build" in keys:
                assert keys["image"] == f"tokenline:{keys['build']['target']}", service
            else:
                assert PINNED.match(keys["image"]), service


def test_extras_torch_and_demo_model_are_those_of_the_project() -> None:
    extras = set(PROJECT["project"]["optional-dependencies"])
    asked = [words.split() for words in re.findall(r"needs\.py ([a-z ]+) >", DOCKERFILE.read_text())]
    assert asked == [["redis"], ["redis", "engine"], ["redis", "engine", "gpu"]]
    assert {extra for extras_of_one in asked for extra in extras_of_one} <= extras
    makefile = (ROOT / "Makefile").read_text()
    for name in ("TORCH", "DEMO_MODEL"):
        assert f"{name} ?= {docker_args()[name]}\n" in makefile


def test_the_builder_gets_every_package_and_nothing_else() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    packages = {pattern.rstrip("*") for pattern in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert allowed == packages | {"pyproject.toml", "README.md", "LICENSE"}
    assert (ROOT / ".dockerignore").read_text().splitlines()[1] == "*"


def test_variables_of_the_image_are_settings() -> None:
    assert unknown_variables(image_environment()) == []


def test_ports_are_the_defaults_of_the_settings() -> None:
    server = ServerSettings()
    (exposed,) = (rest for name, rest in dockerfile() if name == "EXPOSE")
    assert exposed.split() == [str(server.port), str(server.ops_port), str(server.otlp_port)]
    (check,) = (rest for name, rest in dockerfile() if name == "HEALTHCHECK")
    assert f"'127.0.0.1', {server.ops_port}" in check
    assert "'/readyz'" in check


def test_every_target_runs_as_nobody_in_particular_with_a_verb_that_exists() -> None:
    from typer.main import get_command

    from cli.main import app

    stages = DOCKERFILE.read_text().split("\nFROM ")[1:]
    final = [stage for stage in stages if stage.startswith("base AS ")]
    assert [stage.split()[2] for stage in final] == ["cpu", "cuda", "gateway"]
    for stage in final:
        assert "\nUSER 10001:10001\nCMD " in stage
        assert re.search(r'CMD \["(\w+)"\]', stage)[1] in get_command(app).commands  # type: ignore[index,attr-defined]


def test_no_secret_is_in_the_image_or_written_out_in_compose() -> None:
    secrets = re.compile(r"(KEY|TOKEN|PASSWORD|SECRET)$")
    assert not [name for name in (*image_environment(), *docker_args()) if secrets.search(name)]
    for service, keys in compose("compose.yaml", "compose.cuda.yaml").items():
        written = {name: value for name, value in keys.get("environment", {}).items() if secrets.search(name)}
        assert set(written.values()) <= {None}, service
