"""The published OpenAPI document: complete, and closed in itself."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.surfaces.catalogue import SURFACES
from gateway.surfaces.openapi import describe


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(describe(SURFACES, "http://h:8080/api", "1"))
    return found


def references(found: Any) -> set[str]:
    if isinstance(found, dict):
        own = {found["$ref"]} if isinstance(found.get("$ref"), str) else set()
        return own.union(*(references(value) for value in found.values()))
    if isinstance(found, list):
        return set().union(*(references(value) for value in found))
    return set()


def test_every_served_path_is_described(document: dict[str, Any]) -> None:
    assert {surface.path for surface in SURFACES} | {"/models", "/models/{model}"} == set(document["paths"])
    assert document["servers"] == [{"url": "http://h:8080/api"}]


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    named = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert "#/components/schemas/MessagesRequest" in references(document) <= named


def test_unknown_fields_are_allowed_since_upstreams_may_know_them(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    assert not [name for name, schema in schemas.items() if schema.get("additionalProperties") is False]
    assert schemas["Request"]["required"] == ["model"]


def test_limits_of_the_gateway_s_own_are_told(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    assert schemas["Request"]["properties"]["n"]["maximum"] == 128
    assert all(schemas[name]["properties"]["model"]["maxLength"] == 256 for name in ("Request", "Asked"))


def test_each_event_of_a_stream_is_described(document: dict[str, Any]) -> None:
    content = document["paths"]["/messages"]["post"]["responses"]["200"]["content"]
    assert content["text/event-stream"]["schema"]["required"] == ["data"]
