"""`response_format` of a chat request."""

from __future__ import annotations

from typing import Any

from backend_engine.fields import Fields, invalid, kind_of, shown
from backend_engine.text.grammar import json_grammar


def parse_format(fields: Fields) -> str | None:
    """The grammar of the answer; None for free text. Raises ApiError 400."""
    wanted = fields.get("response_format")
    if wanted is None:
        return None
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return json_grammar(None)
    if kind != "json_schema":
        raise invalid(
            "response_format",
            "'response_format' must be {'type': 'text'}, {'type': 'json_object'} or {'type': 'json_schema', "
            f"'json_schema': {{'name': ..., 'schema': ...}}}}, not {shown(wanted)}.",
        )
    return json_grammar(_schema(wanted.get("json_schema")))


def _schema(named: Any) -> dict[str, Any]:
    where = "response_format.json_schema"
    schema = named.get("schema") if isinstance(named, dict) else None
    if not isinstance(schema, dict):
        raise invalid(f"{where}.schema", f"'{where}.schema' must be a JSON schema, not {kind_of(schema)}.")
    return schema
