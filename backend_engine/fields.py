"""Values of a request's fields: their types and ranges, and errors that name field, value and range."""

from __future__ import annotations

from typing import Any

import msgspec

from protocol.errors import ApiError

Fields = dict[str, Any]


def invalid(param: str, message: str) -> ApiError:
    """400 for a value of the wrong type or range."""
    return ApiError(400, "invalid_request", message, param=param)


def unsupported(param: str, message: str) -> ApiError:
    """400 for something that we know and have not built: never silently ignored."""
    return ApiError(400, "unsupported_parameter", message, param=param)


def kind_of(value: Any) -> str:
    """A JSON value's kind in words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    names = {int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)


def shown(value: Any) -> str:
    """A value as JSON, short enough for a message."""
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 60 else text[:57] + "..."


def integer(fields: Fields, name: str, low: int, high: int) -> int | None:
    """A whole number from `low` to `high`, if there is one."""
    value = fields.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise invalid(name, f"'{name}' must be a whole number, not {shown(value)}.")
    if not low <= value <= high:
        bounds = f"at least {low}" if value < low else f"at most {high}"
        raise invalid(name, f"'{name}' must be {bounds}, not {shown(value)}.")
    return value


def number(fields: Fields, name: str, default: float, low: float, high: float) -> float:
    """A number from `low` to `high`."""
    value = fields.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise invalid(name, f"'{name}' must be a number, not {shown(value)}.")
    if not low <= value <= high:
        raise invalid(name, f"'{name}' must be from {low:g} to {high:g}, not {shown(value)}.")
    return float(value)


def positive(fields: Fields, name: str, high: float) -> float:
    """A number above 0 and at most `high`; 1 where there is none."""
    found = number(fields, name, 1.0, 0.0, high)
    if found == 0:
        raise invalid(name, f"'{name}' must be above 0 and at most {high:g}, not 0.")
    return found


def flag(fields: Fields, name: str) -> bool:
    """True or false; false where there is none."""
    value = fields.get(name)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise invalid(name, f"'{name}' must be true or false, not {shown(value)}.")
