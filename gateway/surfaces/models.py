"""`/models`: the public models that a key may use, in OpenAI's shape."""

from __future__ import annotations

import msgspec

from gateway.keys.record import KeyRecord
from gateway.upstreams.router import Router, not_found


def _shape(model: str) -> dict[str, object]:
    return {"id": model, "object": "model", "created": 0, "owned_by": "tokenline"}


def _visible(router: Router, key: KeyRecord) -> list[str]:
    return [model for model in router.models if key.may_use(model)]


def list_models(router: Router, key: KeyRecord) -> bytes:
    """`{"object": "list", "data": [...]}`."""
    data = [_shape(model) for model in _visible(router, key)]
    return msgspec.json.encode({"object": "list", "data": data})


def as_anthropic(router: Router, key: KeyRecord, model: str | None) -> bytes:
    """The list, or one model, in Anthropic's shape. Raises ApiError 404 as show_model does."""
    visible = _visible(router, key)
    if model is None:
        data = [_anthropic_shape(name) for name in visible]
        ends = {"first_id": visible[0] if visible else None, "last_id": visible[-1] if visible else None}
        return msgspec.json.encode({"data": data, "has_more": False, **ends})
    if model not in visible:
        raise not_found(model, visible)
    return msgspec.json.encode(_anthropic_shape(model))


def _anthropic_shape(model: str) -> dict[str, str]:
    return {"type": "model", "id": model, "display_name": model, "created_at": "1970-01-01T00:00:00Z"}


def show_model(router: Router, key: KeyRecord, model: str) -> bytes:
    """One model. Raises ApiError 404 for one that doesn't exist, and for one that the key may not use."""
    visible = _visible(router, key)
    if model not in visible:
        raise not_found(model, visible)
    return msgspec.json.encode(_shape(model))
