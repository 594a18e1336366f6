"""Control plane: keys, plans and usage by HTTP. Mounted by the observer on the ops listener, behind the admin key."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Body, HTTPException, Query
from pydantic import BaseModel, ConfigDict, Field

from gateway.keys.changes import MAX_GRACE_SECONDS, AliasInUse, KeyChange, KeyNotFound
from gateway.keys.limits import Limits
from gateway.keys.plans import check_plan, shown_plans
from gateway.keys.record import NewKey
from gateway.keys.stores import STORE_ERRORS, Keys, open_store
from gateway.usage import usage_of
from settings import Settings
from settings.schema import PlanSettings

T = TypeVar("T")


class KeyAsked(BaseModel):
    """What a key is created with."""

    model_config = ConfigDict(extra="forbid")

    alias: str = Field(min_length=1, max_length=128)
    team: str | None = Field(None, max_length=128)
    models: tuple[str, ...] = ()
    expires_ns: int | None = Field(None, gt=0, lt=2**63, description="Nanoseconds since 1970 UTC.")
    plan: str | None = Field(None, max_length=128)
    limits: PlanSettings = PlanSettings()
    tags: tuple[str, ...] = ()

    def as_new_key(self) -> NewKey:
        """Raises ValueError for what no key can have."""
        fields = {name: getattr(self, name) for name in ("alias", "team", "models", "expires_ns", "plan", "tags")}
        return NewKey(**fields, limits=Limits(**self.limits.model_dump()))


class Change(BaseModel):
    """What becomes different about a key: what is left out stays, null takes away."""

    model_config = ConfigDict(extra="forbid")

    alias: str = Field("", min_length=1, max_length=128)
    team: str | None = Field(None, max_length=128)
    models: tuple[str, ...] = Field((), description="Empty: all.")
    expires_ns: int | None = Field(None, gt=0, lt=2**63, description="Nanoseconds since 1970 UTC.")
    plan: str | None = Field(None, max_length=128)
    limits: PlanSettings = Field(PlanSettings(), description="Those that are left out stay; null: the plan's.")
    tags: tuple[str, ...] = ()

    def as_key_change(self) -> KeyChange:
        """With what was given alone."""
        return KeyChange(**self.model_dump(exclude_unset=True))


class Rotation(BaseModel):
    """How a key is rotated."""

    model_config = ConfigDict(extra="forbid")

    grace_seconds: float = Field(0, ge=0, le=MAX_GRACE_SECONDS, description="The old secret works this much longer.")


def keys_router(current: Callable[[], Settings]) -> APIRouter:
    """Routes /keys (list, create, show, alter, rotate, revoke), /plans and /usage. `current`: the settings in force."""
    router = APIRouter(tags=["keys"])
    store = open_store(current())
    _add_key_routes(router, current, store)

    @router.get("/plans")
    def list_plans() -> dict[str, Any]:
        return shown_plans(current())

    @router.get("/usage")
    def usage(window: str = "24h", by: Annotated[Literal["key", "team", "model"], Query()] = "key") -> dict[str, Any]:
        """Requests and tokens of the window, by key, team or model."""
        return _asked(lambda: usage_of(current(), window, by, time.time_ns()))

    return router


def _add_key_routes(router: APIRouter, current: Callable[[], Settings], store: Keys) -> None:
    @router.get("/keys")
    def list_keys() -> dict[str, Any]:
        return {"keys": [record.public() for record in _asked(store.list)]}

    @router.post("/keys", status_code=201)
    def create_key(new: Annotated[KeyAsked, Body()]) -> dict[str, Any]:
        def create() -> dict[str, Any]:
            check_plan(current(), new.plan)
            secret, record = store.create(new.as_new_key())
            return {"secret": secret, **record.public()}

        return _asked(create)

    @router.get("/keys/{id_or_alias}")
    def show_key(id_or_alias: str) -> dict[str, Any]:
        return _asked(lambda: store.show(id_or_alias)).public()

    @router.patch("/keys/{id_or_alias}")
    def alter_key(id_or_alias: str, change: Annotated[Change, Body()]) -> dict[str, Any]:
        def alter() -> dict[str, Any]:
            check_plan(current(), change.plan)
            return store.alter(id_or_alias, change.as_key_change()).public()

        return _asked(alter)

    @router.post("/keys/{id_or_alias}/rotate")
    def rotate_key(id_or_alias: str, how: Annotated[Rotation, Body()]) -> dict[str, Any]:
        secret, record = _asked(lambda: store.rotate(id_or_alias, how.grace_seconds))
        return {"secret": secret, **record.public()}

    @router.delete("/keys/{id_or_alias}")
    def revoke_key(id_or_alias: str) -> dict[str, Any]:
        return _asked(lambda: store.revoke(id_or_alias)).public()


def _asked(call: Callable[[], T]) -> T:
    """What the store says, its errors as statuses; 503 when it can't be used (a full disk, a dead Redis)."""
    try:
        return call()
    except KeyNotFound as error:
        raise HTTPException(404, str(error.args[0])) from error
    except AliasInUse as error:
        raise HTTPException(409, str(error)) from error
    except ValueError as error:
        raise HTTPException(422, str(error)) from error
    except STORE_ERRORS as error:
        raise HTTPException(503, f"The store can't be used: {error}") from error
