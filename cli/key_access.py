"""Where `tokenline keys` finds keys: the store that the configuration names, or a running gateway's admin API."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from cli.errors import CliError, Exit

Record = dict[str, Any]


class Keys(Protocol):
    """Records and answers are as the admin API gives them."""

    def create(self, asked: Record) -> Record: ...
    def list(self) -> list[Record]: ...
    def show(self, id_or_alias: str) -> Record: ...
    def alter(self, id_or_alias: str, change: Record) -> Record: ...
    def rotate(self, id_or_alias: str, grace_seconds: float) -> Record: ...
    def revoke(self, id_or_alias: str) -> Record: ...
    def plans(self) -> Record: ...
    def usage(self, window: str, by: str) -> Record: ...


def keys_of(ops_url: str | None, config: Path | None) -> Keys:
    """A running gateway's keys where one is named, else the store's own."""
    return GatewayKeys(ops_url, config) if ops_url else StoredKeys(config)


class StoredKeys:
    """The key store: a file in the state folder, or the Redis of redis.url."""

    def __init__(self, config: Path | None) -> None:
        from cli.ops import load_for_asking
        from gateway.keys.stores import STORE_ERRORS, open_store
        from settings.paths import prepare_state_dir

        self._settings = load_for_asking(config).settings
        prepare_state_dir(self._settings)
        self._where = "in Redis" if self._settings.redis.url else str(self._settings.keys_path)
        self._unusable = STORE_ERRORS
        self._store = self._doing(lambda: open_store(self._settings))

    def _doing(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except self._unusable as error:
            raise CliError(f"the key store {self._where} can't be used: {error}") from None
        except LookupError as error:
            raise CliError(str(error.args[0]), Exit.NOT_FOUND) from None
        except ValueError as error:
            raise CliError(str(error)) from None

    def create(self, asked: Record) -> Record:
        from gateway.keys.limits import Limits
        from gateway.keys.plans import check_plan
        from gateway.keys.record import NewKey

        def make() -> Any:
            check_plan(self._settings, asked["plan"])
            fields = {**asked, "models": tuple(asked["models"]), "tags": tuple(asked["tags"])}
            return self._store.create(NewKey(**{**fields, "limits": Limits(**asked["limits"])}))

        secret, record = self._doing(make)
        return {"secret": secret, **record.public()}

    def list(self) -> list[Record]:
        return [record.public() for record in self._doing(self._store.list)]

    def show(self, id_or_alias: str) -> Record:
        record: Record = self._doing(lambda: self._store.show(id_or_alias)).public()
        return record

    def alter(self, id_or_alias: str, change: Record) -> Record:
        from gateway.keys.changes import KeyChange
        from gateway.keys.plans import check_plan

        def alter() -> Record:
            check_plan(self._settings, change.get("plan"))
            fields: Record = {**change, **{name: tuple(change[name]) for name in ("models", "tags") if name in change}}
            found: Record = self._store.alter(id_or_alias, KeyChange(**fields)).public()
            return found

        record: Record = self._doing(alter)
        return record

    def rotate(self, id_or_alias: str, grace_seconds: float) -> Record:
        secret, record = self._doing(lambda: self._store.rotate(id_or_alias, grace_seconds))
        return {"secret": secret, **record.public()}

    def revoke(self, id_or_alias: str) -> Record:
        record: Record = self._doing(lambda: self._store.revoke(id_or_alias)).public()
        return record

    def plans(self) -> Record:
        from gateway.keys.plans import shown_plans

        return shown_plans(self._settings)

    def usage(self, window: str, by: str) -> Record:
        from gateway.usage import usage_of

        found: Record = self._doing(lambda: usage_of(self._settings, window, by, time.time_ns()))
        return found


class GatewayKeys:
    """The admin API of a running gateway."""

    def __init__(self, ops_url: str, config: Path | None) -> None:
        from cli.ops import ops_client

        self._client = ops_client(ops_url, config)

    def create(self, asked: Record) -> Record:
        return self._client.request("POST", "/keys", json=asked)

    def list(self) -> list[Record]:
        found: list[Record] = self._client.request("GET", "/keys")["keys"]
        return found

    def show(self, id_or_alias: str) -> Record:
        return self._client.request("GET", _path(id_or_alias))

    def alter(self, id_or_alias: str, change: Record) -> Record:
        return self._client.request("PATCH", _path(id_or_alias), json=change)

    def rotate(self, id_or_alias: str, grace_seconds: float) -> Record:
        return self._client.request("POST", _path(id_or_alias) + "/rotate", json={"grace_seconds": grace_seconds})

    def revoke(self, id_or_alias: str) -> Record:
        return self._client.request("DELETE", _path(id_or_alias))

    def plans(self) -> Record:
        return self._client.request("GET", "/plans")

    def usage(self, window: str, by: str) -> Record:
        return self._client.request("GET", "/usage", params={"window": window, "by": by})


def _path(id_or_alias: str) -> str:
    return f"/keys/{quote(id_or_alias, safe='')}"
