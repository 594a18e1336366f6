"""Where keys are kept: SQLite in the state folder, or the Redis that several gateways share."""

from __future__ import annotations

import sqlite3
from typing import Protocol

from gateway.keys.changes import KeyChange
from gateway.keys.record import KeyRecord, NewKey
from gateway.keys.store import KeyStore
from settings import Settings
from settings.errors import SettingsError

STORE_ERRORS = (sqlite3.Error, OSError)
"""What a store raises when it can't be used."""
CONTROL_SECONDS = 5.0
"""An admin's command waits this long for Redis."""
LOOKUP_SECONDS = 1.0
"""So does a key that this worker has not seen. Verified ones wait for nothing: within this time the watch has noticed
an outage, and they are taken to be stale much later (`verify.STALE_NS`)."""


class Watch(Protocol):
    """Tells cheaply whether any key has changed."""

    def changed(self) -> bool: ...
    def close(self) -> None: ...


class Keys(Protocol):
    """A store of keys. Every method blocks and may raise one of STORE_ERRORS."""

    def create(self, new: NewKey) -> tuple[str, KeyRecord]: ...
    def list(self) -> list[KeyRecord]: ...
    def find(self, secret_digest: bytes) -> KeyRecord | None: ...
    def show(self, id_or_alias: str) -> KeyRecord: ...
    def alter(self, id_or_alias: str, change: KeyChange) -> KeyRecord: ...
    def rotate(self, id_or_alias: str, grace_seconds: float) -> tuple[str, KeyRecord]: ...
    def revoke(self, id_or_alias: str) -> KeyRecord: ...
    def watch(self) -> Watch: ...


def open_store(settings: Settings, timeout_seconds: float = CONTROL_SECONDS) -> Keys:
    """The store that the settings name. Raises one of STORE_ERRORS, SettingsError without the package redis."""
    if settings.redis.url is None:
        return KeyStore(settings.keys_path)
    require_redis()
    from gateway.keys.redis_store import RedisKeyStore

    return RedisKeyStore(settings.redis, timeout_seconds)


def require_redis() -> None:
    """Raises SettingsError when redis.url is set and its client isn't installed."""
    try:
        import redis  # noqa: F401
    except ImportError:
        raise SettingsError(
            "redis.url is set, but the package redis is not installed: pip install 'tokenline[redis]'"
        ) from None
