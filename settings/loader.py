"""Loading: a file, the environment and the command line become one frozen Settings, and it is known what came whence.

Order: the command line wins over TOKENLINE_SECTION__KEY variables, those win over the file, the file wins over the
defaults. The file is the one asked for, else TOKENLINE_CONFIG, else ./tokenline.toml where there is one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, SecretStr, ValidationError

from settings.catalogue import Path_, allowed_of, field_at, fields_of, is_secret, shape_of
from settings.checks import check_consistent
from settings.errors import SettingsError
from settings.paths import state_dir_of
from settings.schema import Settings
from settings.sources import Given, Layer, expand, misspelled_overrides, read_environment, read_file, read_flags

DEFAULT_FILE = Path("tokenline.toml")


@dataclass(frozen=True)
class Loaded:
    """Settings, the origin of every effective key, and what the user should know about them."""

    settings: Settings
    origins: dict[str, str]
    """Dotted key -> "default", a file, a variable or an option."""
    notes: tuple[str, ...]
    file: Path | None
    """The file that was read, if any."""


def load_settings(
    path: Path | None = None,
    environ: Mapping[str, str] = os.environ,
    flags: Mapping[str, tuple[str, Any]] | None = None,
    without: Collection[Path_] = (),
) -> Loaded:
    """The effective settings. `flags`: dotted key -> (option, value); `without`: keys that the caller has no use for,
    left at their defaults so that what they refer to need not exist. Raises SettingsError.
    """
    file = _file_to_read(path, environ)
    from_file = read_file(file) if file else {}
    layer: Layer = {**from_file, **read_environment(environ), **read_flags(flags or {})}
    layer = {
        key: expand(key, given, environ) if given is from_file.get(key) else given
        for key, given in layer.items()
        if key not in without
    }
    notes = _notes(from_file, environ)
    if _only_upstreams(layer):
        reason = "[[upstreams]] are set and no [engine] key is"
        layer["engine", "backend"] = Given("none", reason, ("engine", "backend"))
    settings = _validated(layer, state_dir_of(environ))
    check_consistent(settings)
    origins = {
        ".".join(key): layer[key].where(key) if key in layer else "default" for key, _, _ in effective_values(settings)
    }
    origins["state_dir"] = "TOKENLINE_STATE_DIR" if environ.get("TOKENLINE_STATE_DIR") else "default"
    return Loaded(settings, origins, notes, file)


def effective_values(settings: Settings) -> Iterator[tuple[Path_, Any, bool]]:
    """(key, value, is it a secret) of every effective key, entries of lists and maps included."""
    yield from _values(settings, ())


def _values(model: BaseModel, path: Path_) -> Iterator[tuple[Path_, Any, bool]]:
    for name, field in fields_of(type(model)).items():
        value = getattr(model, name)
        kind, _ = shape_of(field)
        here = (*path, name)
        if kind == "leaf":
            yield here, value.get_secret_value() if isinstance(value, SecretStr) else value, is_secret(field)
        elif kind == "table":
            yield from _values(value, here)
        else:
            entries = value.items() if kind == "map" else enumerate(value)
            for entry_name, entry in entries:
                yield from _values(entry, (*here, str(entry_name)))


def _file_to_read(path: Path | None, environ: Mapping[str, str]) -> Path | None:
    if path is not None:
        return path
    if environ.get("TOKENLINE_CONFIG"):
        return Path(environ["TOKENLINE_CONFIG"])
    return DEFAULT_FILE if DEFAULT_FILE.exists() else None


def _only_upstreams(layer: Layer) -> bool:
    """Upstreams were named and nothing was said about an engine: then none is wanted."""
    sections = {key[0] for key in layer}
    return "upstreams" in sections and "engine" not in sections


def _notes(from_file: Layer, environ: Mapping[str, str]) -> tuple[str, ...]:
    notes = misspelled_overrides(environ)
    for key, given in from_file.items():
        field = field_at(key)
        if field is not None and is_secret(field) and isinstance(given.value, str) and "${" not in given.value:
            notes.append(
                f"{given.origin}: {'.'.join(key)} is written out; a file may be committed, so name a variable "
                f'instead: {key[-1]} = "${{TOKENLINE_{key[-1].upper()}}}"'
            )
    return tuple(notes)


def _nested(layer: Layer) -> dict[str, Any]:
    """The layer as nested tables; entries of lists in the order of their numbers, none left out."""
    root: dict[str, Any] = {}
    for key, given in layer.items():
        table = root
        for part in key[:-1]:
            table = table.setdefault(part, {})
        table[key[-1]] = given.value
    return {name: _with_lists(value, (name,)) for name, value in root.items()}


def _with_lists(value: Any, path: Path_) -> Any:
    if not isinstance(value, dict):
        return value
    inner = {name: _with_lists(entry, (*path, name)) for name, entry in value.items()}
    is_list = path[0] in ("upstreams", "models") and (len(path) == 1 or path[-1] == "targets")
    if not is_list:
        return inner
    expected = [str(number) for number in range(len(inner))]
    if sorted(inner, key=int) != expected:
        missing = next(number for number in expected if number not in inner)
        raise SettingsError(f"{'.'.join(path)}: entry {missing} is not given, but a later one is; count from 0")
    return [inner[number] for number in expected]


def _validated(layer: Layer, state_dir: Path) -> Settings:
    nested = _nested(layer)
    slo = nested.get("slo")
    if slo is not None:
        slo.setdefault("default", {})
    try:
        # The JSON mode is strict about types and still takes lists for tuples.
        text = json.dumps({**nested, "state_dir": str(state_dir)})
        return Settings.model_validate_json(text, strict=True)
    except ValidationError as error:
        raise SettingsError(_in_plain_words(error, layer)) from None


def _in_plain_words(error: ValidationError, layer: Layer) -> str:
    """The first fault of a validation: key, value, origin, what is allowed."""
    first = error.errors(include_url=False)[0]
    key = tuple(str(part) for part in first["loc"])
    field = field_at(key)
    dotted = ".".join(key)
    if first["type"] == "missing" or field is None:
        return f"{dotted} is missing" if first["type"] == "missing" else f"{dotted}: {first['msg']}"
    given = layer.get(key)
    if given is None:
        return f"{dotted}: {first['msg']}"
    shown = "(hidden)" if is_secret(field) else json.dumps(given.value)
    return f"{'.'.join(given.written_as)} = {shown} ({given.origin}): must be {allowed_of(field)}"
