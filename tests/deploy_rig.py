"""What the deployment's files say, read so that tests can hold it against the code."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from settings.catalogue import SPELLINGS, field_at, is_secret
from settings.sources import FILE_SUFFIX, RESERVED

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
DOCKERFILE = DEPLOY / "Dockerfile"
COMPOSE = DEPLOY / "compose"
CHART = DEPLOY / "helm" / "tokenline"
UNITS = DEPLOY / "systemd"
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())

_INTERPOLATION = re.compile(r"\$\{[A-Z_]+(?::-([^}]*))?\}")


def dockerfile() -> list[tuple[str, str]]:
    """(instruction, arguments) in order; continued lines joined, comments left out."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.lstrip().startswith("#")]
    text = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in text.splitlines() if line)]


def docker_args() -> dict[str, str]:
    """The defaults of build arguments."""
    return dict(rest.partition("=")[::2] for name, rest in dockerfile() if name == "ARG")


def image_environment() -> dict[str, str]:
    """The variables of the images."""
    found: dict[str, str] = {}
    for name, rest in dockerfile():
        if name == "ENV":
            found |= dict(pair.partition("=")[::2] for pair in rest.split())
    return found


def compose(*names: str) -> dict[str, Any]:
    """The services of compose files, variables at their defaults; later files' keys win within a service."""
    services: dict[str, Any] = {}
    for name in names or ("compose.yaml",):
        text = _INTERPOLATION.sub(lambda found: found[1] or "", (COMPOSE / name).read_text())
        for service, keys in yaml.safe_load(text)["services"].items():
            known = services.setdefault(service, {})
            environment = {**known.get("environment", {}), **keys.get("environment", {})}
            known |= keys | ({"environment": environment} if environment else {})
    return services


def unit_lines(unit: Path) -> list[tuple[str, str]]:
    """(key, value) of a systemd unit, in order."""
    lines = (line for line in unit.read_text().splitlines() if "=" in line and not line.startswith(("#", "[")))
    return [(key, value) for key, _, value in (line.partition("=") for line in lines)]


def unit_environment(unit: Path) -> dict[str, str]:
    """The variables that a unit sets."""
    return dict(value.partition("=")[::2] for key, value in unit_lines(unit) if key == "Environment")


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """TOKENLINE_ variables that nothing reads."""
    return [name for name in environ if name.startswith("TOKENLINE_") and not _is_read(name)]


def _is_read(name: str) -> bool:
    if "__" not in name:
        return name in RESERVED
    path = tuple(part.lower() for part in name.removeprefix("TOKENLINE_").split("__"))
    if field_at(SPELLINGS.get(path, path)) is not None:
        return True
    field = field_at((*path[:-1], path[-1].removesuffix(FILE_SUFFIX)))
    return path[-1].endswith(FILE_SUFFIX) and field is not None and is_secret(field)


def with_secrets(environ: Mapping[str, str | None], folder: Path) -> dict[str, str]:
    """The same variables, files of secrets laid into `folder`."""
    given = {name: str(value) for name, value in environ.items() if value is not None}
    for name, value in given.items():
        if name.endswith("_FILE"):
            file = folder / Path(value).name
            file.write_text("redis://:pw@redis:6379/0" if "URL" in name else f"secret-{Path(value).name}")
            given[name] = str(file)
    return given


def chart_references() -> Iterator[tuple[str, tuple[str, ...]]]:
    """(template, path) of every .Values.a.b that a template reads."""
    for template in sorted((CHART / "templates").iterdir()):
        for found in re.finditer(r"\.Values((?:\.[A-Za-z]+)+)", template.read_text()):
            yield template.name, tuple(found[1].strip(".").split("."))


def chart_variables() -> set[str]:
    """Names of TOKENLINE_ variables that the chart's templates set."""
    texts = (template.read_text() for template in (CHART / "templates").iterdir())
    return {name for text in texts for name in re.findall(r"name: (TOKENLINE_[A-Z0-9_]+)", text)}
