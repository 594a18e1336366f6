"""Keys in a Redis, shared by every gateway that names it. Blocking: the hot path goes through `verify`.

`PREFIX:keys` holds records by id, `PREFIX:digests` ids by the SHA-256 of a secret, `PREFIX:version` a number that every
change raises; writers watch it, so that two changes never overlap.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from gateway.keys.changes import (
    KeyChange,
    StoreUnreachable,
    alias_in_use,
    altered,
    key_not_found,
    made,
    revoked,
    rotated,
)
from gateway.keys.record import KeyRecord, NewKey
from settings.schema import RedisSettings

Records = list[KeyRecord]
_decode = msgspec.json.Decoder(KeyRecord).decode


class RedisKeyStore:
    """What `KeyStore` is, in a Redis. Raises StoreUnreachable."""

    def __init__(self, settings: RedisSettings, timeout_seconds: float) -> None:
        assert settings.url is not None, "a Redis has a URL"
        self._redis: Any = redis.Redis.from_url(
            settings.url.get_secret_value(),
            socket_timeout=timeout_seconds,
            socket_connect_timeout=timeout_seconds,
            retry=Retry(NoBackoff(), 0),
        )
        self._keys = f"{settings.prefix}:keys"
        self._digests = f"{settings.prefix}:digests"
        self._version_key = f"{settings.prefix}:version"

    def create(self, new: NewKey) -> tuple[str, KeyRecord]:
        """A new key: (secret, record). Raises AliasInUse."""

        def change(found: Records) -> tuple[str, KeyRecord]:
            if any(record.alias == new.alias and record.revoked_ns is None for record in found):
                raise alias_in_use(new.alias)
            return made(new, time.time_ns())

        return self._change(change)

    def list(self) -> Records:
        """Every key, newest first, revoked ones included."""
        with _asking():
            return self._all(self._redis)

    def find(self, secret_digest: bytes) -> KeyRecord | None:
        """The key whose secret has, or had before its last rotation, this SHA-256."""
        with _asking():
            key_id = self._redis.hget(self._digests, secret_digest)
            body = self._redis.hget(self._keys, key_id) if key_id else None
        return _decode(body) if body else None

    def show(self, id_or_alias: str) -> KeyRecord:
        """The key with this id, else with this alias; of several the one that works. Raises KeyNotFound."""
        return _named(self.list(), id_or_alias)

    def alter(self, id_or_alias: str, change: KeyChange) -> KeyRecord:
        """Changes what a key may do. Raises KeyNotFound, AliasInUse, ValueError."""
        return self._change(lambda found: ("", altered(_named(found, id_or_alias), change, found)))[1]

    def rotate(self, id_or_alias: str, grace_seconds: float) -> tuple[str, KeyRecord]:
        """A new secret for a key: (secret, record); the old one works on for the grace period. Raises KeyNotFound,
        ValueError for a revoked key."""
        return self._change(lambda found: rotated(_named(found, id_or_alias), grace_seconds, time.time_ns()))

    def revoke(self, id_or_alias: str) -> KeyRecord:
        """Ends a key, for good. Revoking twice keeps the first time. Raises KeyNotFound."""

        def change(found: Records) -> tuple[str, KeyRecord]:
            record = _named(found, id_or_alias)
            return "", record if record.revoked_ns is not None else revoked(record, time.time_ns())

        return self._change(change)[1]

    def watch(self) -> RedisWatch:
        """Something that tells cheaply whether any key has changed."""
        return RedisWatch(self._redis, self._version_key)

    def _change(self, change: Callable[[Records], tuple[str, KeyRecord]]) -> tuple[str, KeyRecord]:
        """Writes what `change` makes of the keys; again if somebody else was faster."""

        def attempt(pipe: Any) -> tuple[str, KeyRecord]:
            found = self._all(pipe)
            secret, record = change(found)
            before = next((old for old in found if old.id == record.id), None)
            pipe.multi()
            if before is not None:
                gone = {before.digest, before.previous_digest} - {record.digest, record.previous_digest, None}
                if gone:
                    pipe.hdel(self._digests, *gone)
            pipe.hset(self._digests, record.digest, record.id)
            pipe.hset(self._keys, record.id, msgspec.json.encode(record))
            pipe.incr(self._version_key)
            return secret, record

        with _asking():
            made: tuple[str, KeyRecord] = self._redis.transaction(attempt, self._version_key, value_from_callable=True)
        return made

    def _all(self, asked: Any) -> Records:
        found = [_decode(body) for body in asked.hgetall(self._keys).values()]
        return sorted(found, key=lambda record: -record.created_ns)


class RedisWatch:
    """Answers whether any key has changed since it was last asked. One thread at a time."""

    def __init__(self, client: Any, version_key: str) -> None:
        self._redis = client
        self._version_key = version_key
        self._version = self._read()

    def changed(self) -> bool:
        """True once after each change. Raises StoreUnreachable."""
        version, self._version = self._version, self._read()
        return version != self._version

    def close(self) -> None:
        """Lets go of the connection."""
        self._redis.close()

    def _read(self) -> bytes | None:
        with _asking():
            version: bytes | None = self._redis.get(self._version_key)
        return version


def _named(found: Records, id_or_alias: str) -> KeyRecord:
    matching = [record for record in found if id_or_alias in (record.id, record.alias)]
    if not matching:
        raise key_not_found(id_or_alias)
    return min(
        matching, key=lambda record: (record.id != id_or_alias, record.revoked_ns is not None, -record.created_ns)
    )


@contextmanager
def _asking() -> Iterator[None]:
    try:
        yield
    except redis.RedisError as error:
        raise StoreUnreachable(f"Redis can't be asked: {error}") from error
