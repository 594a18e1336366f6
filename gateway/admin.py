"""Control plane: keys by HTTP. Mounted by the observer on the ops listener, behind the admin key."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Body, HTTPException
from pydantic import BaseModel, ConfigDict, Field

from gateway.keys.store import AliasInUse, KeyNotFound, KeyStore
from settings import Settings

T = TypeVar("T")


class NewKey(BaseModel):
    """What a key is created with."""

    model_config = ConfigDict(extra="forbid")

    alias: str = Field(min_length=1, max_length=128)
    team: str | None = Field(None, max_length=128)
    models: tuple[str, ...] = ()
    expires_ns: int | None = Field(None, gt=0, lt=2**63, description="Nanoseconds since 1970 UTC.")


def keys_router(settings: Settings) -> APIRouter:
    """Routes /keys: list, create (the secret is in this answer only), revoke."""
    router = APIRouter(prefix="/keys", tags=["keys"])
    store = KeyStore(settings.keys_path)

    def stored(call: Callable[[], T]) -> T:
        """What the store says; 503 with the reason when it can't be used (a full disk, a locked or damaged file)."""
        try:
            return call()
        except sqlite3.Error as error:
            raise HTTPException(503, f"The key store can't be used: {error}") from error

    @router.get("")
    def list_keys() -> dict[str, Any]:
        return {"keys": [record.public() for record in stored(store.list)]}

    @router.post("", status_code=201)
    def create_key(new: Annotated[NewKey, Body()]) -> dict[str, Any]:
        try:
            secret, record = stored(lambda: store.create(new.alias, new.team, new.models, new.expires_ns))
        except (AliasInUse, ValueError) as error:
            raise HTTPException(409 if isinstance(error, AliasInUse) else 422, str(error)) from error
        return {"secret": secret, **record.public()}

    @router.delete("/{id_or_alias}")
    def revoke_key(id_or_alias: str) -> dict[str, Any]:
        try:
            return stored(lambda: store.revoke(id_or_alias)).public()
        except KeyNotFound as error:
            raise HTTPException(404, str(error.args[0])) from error

    return router
