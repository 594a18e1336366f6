"""Requests that are translated: read strictly, so that nothing that was asked for gets lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from gateway.surfaces.openai import wrong_field
from protocol.errors import ApiError

T = TypeVar("T")


def refuse(field: str, why: str) -> ApiError:
    """The 400 of a field that has no translation."""
    return ApiError(400, "unsupported_parameter", f"The field '{field}' can't be translated: {why}", param=field)


def read_fields(body: bytes, decode: Callable[[bytes], T], api: str) -> T:
    """The request with all its fields. Raises ApiError 400 for one that isn't known, or has a value that isn't."""
    try:
        return decode(body)
    except msgspec.ValidationError as error:
        raise untranslatable(error, api) from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise ApiError(400, "invalid_json", f"The body is not valid JSON: {error}") from error


def untranslatable(error: msgspec.ValidationError, api: str, prefix: str = "") -> ApiError:
    """msgspec's words name the place: "Invalid value 'x' - at `$.messages[0].content[1].type`"."""
    said, _, place = str(error).partition(" - at ")
    field = prefix + place.strip("`").removeprefix("$").removeprefix("." if not prefix else "")
    if "unknown field" in said:
        field = f"{field}.{said.split('`')[1]}".strip(".")
        return refuse(field, f"the upstream of this model has no {api} API, and chat has no such field. Leave it out.")
    if said.startswith(("Invalid value", "Invalid enum value")):
        value = said.split(" value ")[-1]
        return refuse(field, f"the upstream of this model has no {api} API, and chat has no {value}.")
    if prefix or "missing" in said:
        missing = said.split("`")[1] if "missing" in said else ""
        field = f"{field}.{missing}".strip(".") if missing else field
        what = "is missing" if missing else f"is wrong: {said}"
        return ApiError(400, "invalid_request", f"The field '{field}' {what}.", param=field)
    return wrong_field(error)
