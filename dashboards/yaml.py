"""Writing YAML of plain values: nested blocks, strings quoted as JSON, long ones as literal blocks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from dashboards.sources import GENERATED


def yaml_text(value: dict[str, Any]) -> str:
    """A document with a head line that says what it was made by."""
    return f"# {GENERATED}\n" + "\n".join(_mapping(value, 0)) + "\n"


def _mapping(value: dict[str, Any], depth: int) -> Iterator[str]:
    pad = "  " * depth
    for key, item in value.items():
        if isinstance(item, dict) and item:
            yield f"{pad}{key}:"
            yield from _mapping(item, depth + 1)
        elif isinstance(item, list) and item:
            yield f"{pad}{key}:"
            yield from _sequence(item, depth + 1)
        elif isinstance(item, str) and "\n" in item:
            yield f"{pad}{key}: |-"
            yield from (f"{pad}  {line}" if line else "" for line in item.split("\n"))
        else:
            yield f"{pad}{key}: {_scalar(item)}"


def _sequence(value: list[Any], depth: int) -> Iterator[str]:
    pad = "  " * depth
    for item in value:
        if isinstance(item, dict):
            first, *rest = _mapping(item, depth + 1)
            yield f"{pad}- {first.lstrip()}"
            yield from rest
        else:
            yield f"{pad}- {_scalar(item)}"


def _scalar(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
