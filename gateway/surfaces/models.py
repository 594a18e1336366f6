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


def show_model(router: Router, key: KeyRecord, model: str) -> bytes:
    """One model. Raises ApiError 404 for one that doesn't exist, and for one that the key may not use."""
    visible = _visible(router, key)
    if model not in visible:
        raise not_found(model, visible)
    return msgspec.json.encode(_shape(model))
