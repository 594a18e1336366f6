"""Where values come from: a TOML file, the environment, the command line. Each becomes a flat layer of given values."""

from __future__ import annotations

import datetime
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from settings.catalogue import (
    SPELLINGS,
    Path_,
    environment_name,
    field_at,
    fields_of,
    is_secret,
    is_text,
    shape_of,
    unknown_key,
)
from settings.errors import SettingsError
from settings.schema import Settings

PREFIX = "TOKENLINE_"
FILE_SUFFIX = "_file"
"""After a secret's name: the variable names a file that holds it (how Docker and systemd hand secrets over)."""
_REFERENCE = re.compile(r"\$\$\{|\$\{([A-Za-z_][A-Za-z0-9_]*)\}|\$\{")


@dataclass(frozen=True)
class Given:
    """A value that somebody gave, where, and under which spelling."""

    value: Any
    origin: str
    written_as: Path_

    def where(self, path: Path_) -> str:
        """The origin in words, with the other spelling where one was used."""
        return self.origin if self.written_as == path else f"{self.origin}, as {'.'.join(self.written_as)}"


Layer = dict[Path_, Given]
"""What one source gives, by the one spelling that each setting is kept under."""


def read_file(file: Path) -> Layer:
    """The layer of a TOML file. `${NAME}` is not expanded yet: what another layer overrides need not be set."""
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SettingsError(f"{file}: there is no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{file}: can't be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{file}: not valid TOML: {error}") from None
    given: list[tuple[Path_, Any]] = []
    _flatten(table, Settings, (), str(file), given)
    return _layer((path, Given(value, str(file), path)) for path, value in given)


def read_environment(environ: Mapping[str, str]) -> Layer:
    """The layer of TOKENLINE_SECTION__KEY variables, and of secrets' KEY_FILE. An empty variable counts as not set."""
    given: list[tuple[Path_, Given]] = []
    for name in sorted(environ):
        if not name.startswith(PREFIX) or "__" not in name or not environ[name]:
            continue
        path = tuple(part.lower() for part in name.removeprefix(PREFIX).split("__"))
        field = field_at(SPELLINGS.get(path, path))
        if field is None and (secret := _secret_path(path)) is not None:
            if environ.get(environment_name(secret)):
                raise SettingsError(f"{environment_name(secret)} and {name} are both set; give one of them")
            given.append((secret, _read_secret(name, Path(environ[name]), secret)))
            continue
        if field is None:
            raise SettingsError(f"environment variable {name}: {unknown_key(path)}")
        value = environ[name] if is_text(field) else _as_toml(environ[name])
        given.append((path, Given(value, name, path)))
    return _layer(given)


def _secret_path(path: Path_) -> Path_ | None:
    """The secret setting that TOKENLINE_..._FILE names the file of, or None where there is none."""
    kept = (*path[:-1], path[-1].removesuffix(FILE_SUFFIX))
    field = field_at(kept) if kept != path else None
    return kept if field is not None and is_secret(field) else None


def _read_secret(name: str, file: Path, path: Path_) -> Given:
    """The file's text without white space around it. Never part of an error."""
    try:
        value = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise SettingsError(f"environment variable {name}: the file {file} can't be read: {reason}") from None
    if not value:
        raise SettingsError(f"environment variable {name}: the file {file} is empty")
    return Given(value, f"{name} ({file})", path)


def read_flags(flags: Mapping[str, tuple[str, Any]]) -> Layer:
    """The layer of the command line: dotted key -> (the option's name, value)."""
    paths = {dotted: tuple(dotted.split(".")) for dotted in flags}
    return {paths[dotted]: Given(value, option, paths[dotted]) for dotted, (option, value) in flags.items()}


def expand(path: Path_, given: Given, environ: Mapping[str, str]) -> Given:
    """`${NAME}` replaced by the variable's value; `$${` stands for a plain `${`."""
    if not isinstance(given.value, str) or "${" not in given.value:
        return given

    def value_of(found: re.Match[str]) -> str:
        if found[0] == "$${":
            return "${"
        if found[1] is None:
            raise SettingsError(
                f'{given.origin}: {".".join(given.written_as)}: "${{" begins a reference that is not '
                '${NAME}; write "$${" for the characters themselves'
            )
        if found[1] not in environ:
            raise SettingsError(
                f"{given.origin}: {'.'.join(given.written_as)} needs the environment variable {found[1]}, "
                "which is not set"
            )
        return environ[found[1]]

    value: Any = _REFERENCE.sub(value_of, given.value)
    field = field_at(path)
    if field is not None and not is_text(field):
        value = _as_toml(value)
    return replace(given, value=value)


def misspelled_overrides(environ: Mapping[str, str]) -> list[str]:
    """Notes on variables that look like overrides with one underscore too few."""
    known = {environment_name(path).replace("__", "_"): environment_name(path) for path in _plain_paths()}
    return [
        f"{name} is not read; the override is spelled {known[name]}"
        for name in sorted(environ)
        if name in known and "__" not in name and name not in RESERVED
    ]


RESERVED = frozenset(
    {
        "TOKENLINE_API_KEY",
        "TOKENLINE_ADMIN_KEY",
        "TOKENLINE_CACHE_DIR",
        "TOKENLINE_CONFIG",
        "TOKENLINE_OPS_URL",
        "TOKENLINE_STATE_DIR",
    }
)
"""Variables with a meaning of their own, not overrides."""


def _plain_paths() -> list[Path_]:
    paths: list[Path_] = []
    for section, field in fields_of(Settings).items():
        kind, inner = shape_of(field)
        if kind == "table" and inner is not None:
            paths += [(section, name) for name in fields_of(inner)]
    return paths


def _as_toml(text: str) -> Any:
    """The TOML number or truth value that a text spells, or the text itself when it spells none."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    value = parsed.get("value")
    return value if set(parsed) == {"value"} and isinstance(value, int | float) and math.isfinite(value) else text


def _layer(given: Any) -> Layer:
    """One value per setting. Two spellings with different values in one source are a contradiction."""
    layer: Layer = {}
    for path, entry in given:
        kept = SPELLINGS.get(path, path)
        other = layer.get(kept)
        if other is not None and other.value != entry.value:
            raise SettingsError(
                f"{'.'.join(other.written_as)} = {other.value!r} ({other.origin}) and "
                f"{'.'.join(entry.written_as)} = {entry.value!r} ({entry.origin}) are one setting with two values; "
                "give one of them"
            )
        if other is None or entry.written_as == kept:
            layer[kept] = entry
    return layer


def _flatten(
    table: Mapping[str, Any], model: type[BaseModel], path: Path_, origin: str, given: list[tuple[Path_, Any]]
) -> None:
    """Appends every value below `table`; refuses keys that the schema doesn't know and tables in the wrong place."""
    fields = fields_of(model)
    for name, value in table.items():
        here = (*path, name)
        dotted = ".".join(here)
        if here in SPELLINGS:
            given.append((here, _plain(value, dotted, origin)))
            continue
        if name not in fields:
            raise SettingsError(f"{origin}: {unknown_key(here)}")
        kind, inner = shape_of(fields[name])
        if inner is None:
            given.append((here, _plain(value, dotted, origin)))
        elif kind == "table":
            if not isinstance(value, dict):
                raise SettingsError(f"{origin}: {dotted} is a table of keys; write [{dotted}], not {name} = {value!r}")
            _flatten(value, inner, here, origin, given)
        elif kind == "list":
            if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
                raise SettingsError(f"{origin}: {dotted} is a list of tables; write [[{dotted}]] before each")
            for number, entry in enumerate(value):
                if not entry:
                    raise SettingsError(f"{origin}: {dotted}.{number} is an empty table; fill it or take it out")
                _flatten(entry, inner, (*here, str(number)), origin, given)
        else:
            _flatten_map(value, inner, here, origin, given)


def _flatten_map(value: Any, inner: type[BaseModel], here: Path_, origin: str, given: list[tuple[Path_, Any]]) -> None:
    dotted = ".".join(here)
    for name, entry in value.items() if isinstance(value, dict) else (("", value),):
        if not isinstance(entry, dict):
            key = f"{dotted}.{name}" if name else dotted
            raise SettingsError(f"{origin}: {key} is not a table; write its keys under [{dotted}.default]")
        if not entry:
            raise SettingsError(f"{origin}: {dotted}.{name} is an empty table; fill it or take it out")
        _flatten(entry, inner, (*here, str(name)), origin, given)


def _plain(value: Any, dotted: str, origin: str) -> Any:
    """A value that the schema's types can hold."""
    if isinstance(value, dict):
        raise SettingsError(f"{origin}: {dotted} is a value, not a table")
    if isinstance(value, datetime.date | datetime.time):
        raise SettingsError(f"{origin}: {dotted} = {value}: dates and times are not used in this file")
    if isinstance(value, float) and not math.isfinite(value):
        raise SettingsError(f"{origin}: {dotted} = {value}: must be a finite number")
    return value
