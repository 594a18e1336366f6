"""The OpenAPI description of what is served (https://spec.openapis.org/oas/v3.1.0)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from gateway.surfaces.openai import MAX_CHOICES, MAX_MODEL_NAME
from gateway.surfaces.shapes import ANTHROPIC_ERRORS
from gateway.surfaces.surface import Surface
from protocol.anthropic import CountRequest, MessagesRequest
from protocol.openai import Asked, Request
from protocol.responses import ResponsesRequest

REQUESTS: dict[str, type[msgspec.Struct]] = {
    "chat": Request,
    "completions": Request,
    "responses": ResponsesRequest,
    "messages": MessagesRequest,
    "count_tokens": CountRequest,
}
"""What is read of a surface's requests; of the others, the model alone."""
LIMITS: dict[str, dict[str, int]] = {
    "model": {"minLength": 1, "maxLength": MAX_MODEL_NAME},
    "n": {"minimum": 1, "maximum": MAX_CHOICES, "multipleOf": 1},
}
"""What a field's value must keep beside its type, on every surface that has the field."""
STREAMED = frozenset({"chat", "completions", "responses", "messages"})
_OPENAI_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "code", "param"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "code": {"type": ["string", "null"]},
                "param": {"type": ["string", "null"]},
                "request_id": {"type": "string"},
            },
        }
    },
}
_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
        "request_id": {"type": "string"},
    },
}
_EVENT = {
    "type": "object",
    "description": "Each event of the stream.",
    "required": ["data"],
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
}
_KEYS = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x_api_key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    "api_key": {"type": "apiKey", "in": "header", "name": "api-key"},
}


def describe(surfaces: Iterable[Surface], base_url: str, version: str) -> bytes:
    """The document as JSON. `base_url` is the advertised one."""
    types = list(dict.fromkeys([*REQUESTS.values(), Asked]))
    found, schemas = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    of_type = dict(zip(types, found, strict=True))
    paths: dict[str, Any] = {
        surface.path: {"post": _operation(surface, of_type[REQUESTS.get(surface.name, Asked)])} for surface in surfaces
    }
    model = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
    paths["/models"] = {"get": _reading("list_models", "The models that the key may use.")}
    paths["/models/{model}"] = {"get": {**_reading("show_model", "One model."), "parameters": [model]}}
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "Tokenline",
                "version": version,
                "description": "Requests may hold more fields than are listed: an upstream that speaks the API gets "
                "them all. Where a request is translated, an unknown field is refused with 400.",
            },
            "servers": [{"url": base_url}],
            "security": [{name: []} for name in _KEYS],
            "paths": paths,
            "components": {
                "schemas": {
                    **{name: _open(schema) for name, schema in schemas.items()},
                    "OpenAIError": _OPENAI_ERROR,
                    "AnthropicError": _ANTHROPIC_ERROR,
                },
                "securitySchemes": _KEYS,
            },
        }
    )


def _operation(surface: Surface, request: dict[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if surface.name in STREAMED:
        content["text/event-stream"] = {"schema": _EVENT}
    error = "AnthropicError" if surface.errors is ANTHROPIC_ERRORS else "OpenAIError"
    return {
        "operationId": surface.name,
        "requestBody": {"required": True, "content": {"application/json": {"schema": request}}},
        "responses": {"200": {"description": "The answer.", "content": content}, **_failures(error)},
    }


def _reading(name: str, what: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"type": "object"}}}
    return {
        "operationId": name,
        "responses": {"200": {"description": what, "content": content}, **_failures("OpenAIError")},
    }


def _failures(error: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{error}"}}}
    return {
        "4XX": {"description": "The request can't be answered as it is.", "content": content},
        "5XX": {"description": "The upstream or the gateway failed.", "content": content},
    }


def _open(schema: dict[str, Any]) -> dict[str, Any]:
    """Unknown fields pass through where the upstream speaks the API; known ones keep their limits."""
    found = {name: value for name, value in schema.items() if name != "additionalProperties" or value is not False}
    if "properties" in found:
        found["properties"] = {name: value | LIMITS.get(name, {}) for name, value in found["properties"].items()}
    return found
