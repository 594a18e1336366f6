"""What can be set, read off the schema: every key with its type, bounds, default and meaning, in words.

The loader asks it whether a key exists and which known one is nearest; `tokenline config schema` and
docs/configuration.md are its contents.
"""

from __future__ import annotations

import difflib
import json
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from settings.schema import Section, Settings

Path_ = tuple[str, ...]
"""A key as a path of names: ("server", "port"), ("upstreams", "0", "url"), ("slo", "smollm2", "ttft_ms")."""

SPELLINGS: dict[Path_, Path_] = {
    ("model", "model_id"): ("engine", "model"),
    ("model", "max_batch_size"): ("scheduler", "max_num_seqs"),
}
"""Second spellings of one setting, and the spelling that it is kept under."""

INDEX, NAME = "N", "NAME"
"""Placeholders in the catalogue for the number of a list's entry and for a name that the user chooses."""


@dataclass(frozen=True)
class Key:
    """One thing that can be set."""

    path: Path_
    allowed: str
    default: str
    meaning: str
    secret: bool

    @property
    def dotted(self) -> str:
        """As it is written in messages: server.port."""
        return ".".join(self.path)

    @property
    def environment(self) -> str:
        """The environment variable that overrides it."""
        return environment_name(self.path)


def environment_name(path: Path_) -> str:
    """TOKENLINE_SERVER__PORT of ("server", "port")."""
    return "TOKENLINE_" + "__".join(path).upper()


def shape_of(field: FieldInfo) -> tuple[Literal["table", "list", "map", "leaf"], type[BaseModel] | None]:
    """How a field nests: one table, a list of tables, a map of named tables, or a value."""
    annotation = field.annotation
    arguments = get_args(annotation)
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "table", annotation
    if get_origin(annotation) is tuple and isinstance(arguments[0], type) and issubclass(arguments[0], Section):
        return "list", arguments[0]
    if get_origin(annotation) is dict:
        return "map", arguments[1]
    return "leaf", None


def fields_of(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """The fields that a file may set; the state folder comes from the environment alone."""
    return {name: field for name, field in model.model_fields.items() if (model, name) != (Settings, "state_dir")}


def catalogue() -> list[Key]:
    """Every key, in the order of the schema."""
    return list(_keys(Settings, ()))


def _keys(model: type[BaseModel], path: Path_) -> Iterator[Key]:
    for name, field in fields_of(model).items():
        kind, inner = shape_of(field)
        if inner is None:
            yield Key((*path, name), allowed_of(field), _default_of(field), field.description or "", is_secret(field))
        else:
            below = {"table": (), "list": (INDEX,), "map": (NAME,)}[kind]
            yield from _keys(inner, (*path, name, *below))


def field_at(path: Path_) -> FieldInfo | None:
    """The value field at a concrete path (indices and names filled in), or None where there is none."""
    model: type[BaseModel] = Settings
    rest = list(path)
    while rest:
        field = fields_of(model).get(rest.pop(0))
        if field is None:
            return None
        kind, inner = shape_of(field)
        if inner is None:
            return None if rest else field
        if kind != "table":
            if not rest or (kind == "list" and not rest[0].isdigit()):
                return None
            rest.pop(0)
        model = inner
    return None


def is_secret(field: FieldInfo) -> bool:
    """Whether the value must not be shown."""
    return SecretStr in _alternatives(field.annotation)


def is_text(field: FieldInfo) -> bool:
    """Whether a value from the environment is taken as it stands rather than read as TOML."""
    kinds = _alternatives(field.annotation)
    return any(kind in (str, SecretStr) or get_origin(kind) is Literal for kind in kinds)


def allowed_of(field: FieldInfo) -> str:
    """The values that a field takes, in words."""
    kinds = [kind for kind in _alternatives(field.annotation) if kind is not type(None)]
    kind = kinds[0]
    bounds: dict[str, Any] = {}
    for constraint in field.metadata:
        for name in ("ge", "gt", "le", "lt", "min_length", "max_length", "pattern"):
            if getattr(constraint, name, None) is not None:
                bounds[name] = getattr(constraint, name)
    if get_origin(kind) is Literal:
        choices = [json.dumps(choice) for choice in get_args(kind)]
        return choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}"
    if kind is bool:
        return "true or false"
    if get_origin(kind) is tuple:
        return "a list of strings"
    if kind in (int, float):
        return ("a whole number" if kind is int else "a number") + _range_of(bounds)
    if "pattern" in bounds:
        return "1 to 64 of the characters A-Z a-z 0-9 . _ -"
    if "max_length" in bounds:
        return f"a string of {bounds.get('min_length', 0)} to {bounds['max_length']} characters"
    return "a string"


def _range_of(bounds: dict[str, Any]) -> str:
    low, above, high, below = (bounds.get(name) for name in ("ge", "gt", "le", "lt"))
    words = []
    if low is not None:
        words.append(f"at least {low}")
    if above is not None:
        words.append(f"above {above}")
    if high is not None:
        words.append(f"at most {high}")
    if below is not None:
        words.append(f"below {below}")
    if low is not None and high is not None:
        return f" from {low} to {high}"
    return " " + " and ".join(words) if words else ""


def _default_of(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return "not set" if value is None else json.dumps(value)


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) in (Union, types.UnionType):
        return get_args(annotation)
    return (annotation,)


def unknown_key(path: Path_) -> str:
    """What to tell about a key that doesn't exist: the nearest known one, or what its table knows."""
    dotted = ".".join(path)
    if path == ("state_dir",):
        return "state_dir is not a key of the file; set the environment variable TOKENLINE_STATE_DIR"
    nearest = _nearest(path)
    what = "section" if len(path) == 1 else "key"
    if nearest:
        return f"unknown {what} {dotted}; did you mean {nearest}?"
    return f"unknown {what} {dotted}; `tokenline config schema` lists every key"


def _nearest(path: Path_) -> str | None:
    """The closest known key: by the whole name first, then by the last name alone (a key in the wrong table)."""
    known = {".".join(key.path): key.path for key in catalogue()}
    known |= {".".join(spelling): spelling for spelling in SPELLINGS}
    sections = list(fields_of(Settings))
    if len(path) == 1:
        found = difflib.get_close_matches(path[0], sections, n=1, cutoff=0.6)
        if found:
            return found[0]
    else:
        generic = ".".join(INDEX if part.isdigit() else part for part in path)
        same_table = [dotted for dotted, other in known.items() if other[:-1] == tuple(generic.split("."))[:-1]]
        for choices in (same_table, list(known)):
            found = difflib.get_close_matches(generic, choices, n=1, cutoff=0.75)
            if found:
                return found[0]
    by_last: dict[str, str] = {}
    for dotted, other in known.items():
        by_last.setdefault(other[-1], dotted)
    found = difflib.get_close_matches(path[-1], list(by_last), n=1, cutoff=0.8)
    return by_last[found[0]] if found else None
