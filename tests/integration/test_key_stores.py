"""Both key stores do the same: SQLite in the state folder, and a Redis."""

from __future__ import annotations

import pytest
from redis_rig import RedisServer

from gateway.keys.changes import AliasInUse, KeyChange, KeyNotFound
from gateway.keys.limits import Limits
from gateway.keys.record import KeyRecord, NewKey
from gateway.keys.redis_store import RedisKeyStore
from gateway.keys.secret import digest
from gateway.keys.store import KeyStore


def store_of(kind: str, tmp_path, server: RedisServer) -> KeyStore | RedisKeyStore:
    return KeyStore(tmp_path / "keys.sqlite") if kind == "sqlite" else RedisKeyStore(server.settings(), 5)


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
def test_both_stores_make_find_rotate_and_end_keys_alike(kind, tmp_path, redis_alone) -> None:
    store = store_of(kind, tmp_path, redis_alone)
    watch = store.watch()
    assert not watch.changed()
    new = NewKey("app", "team", ("m",), 2**62, "free", Limits(tokens_per_day=5), ("blue", "web"))
    first, made = store.create(new)
    assert watch.changed()
    assert not watch.changed()
    watch.close()
    assert store.find(digest(first)) == store.show("app") == store.list()[0] == made
    assert (made.plan, made.limits, made.tags) == ("free", Limits(tokens_per_day=5), ("blue", "web"))
    with pytest.raises(AliasInUse):
        store.create(NewKey("app"))
    second, rotated = store.rotate("app", 60)
    assert store.find(digest(first)) == store.find(digest(second)) == rotated
    assert rotated.previous_until_ns - rotated.rotated_ns == 60 * 10**9
    third, _ = store.rotate(made.id, 0)
    assert store.find(digest(first)) is None
    ended = store.revoke("app")
    assert ended.revoked_ns
    assert store.revoke(made.id) == ended
    assert store.find(digest(third)) == ended
    with pytest.raises(ValueError, match="revoked"):
        store.rotate("app", 0)
    with pytest.raises(KeyNotFound):
        store.show("nobody")
    _, again = store.create(NewKey("app"))
    assert store.show("app") == again
    assert store.find(b"x" * 32) is None
    # An alias that is another key's id takes nothing from it.
    store.create(NewKey(again.id))
    assert store.show(again.id) == again
    assert store.revoke(again.id).alias == "app"
    assert store.revoke(again.id).alias == "app"


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
def test_both_stores_alter_keys_alike(kind, tmp_path, redis_alone) -> None:
    store = store_of(kind, tmp_path, redis_alone)
    secret, made = store.create(NewKey("app", "red", ("m",), 2**62, "free", Limits(5, 6, tokens_per_day=7), ("web",)))
    store.create(NewKey("other"))
    watch = store.watch()
    altered = store.alter("app", KeyChange(limits={"requests_per_minute": 9, "tokens_per_day": None}))
    assert watch.changed()
    watch.close()
    assert altered.limits == Limits(9, 6)
    assert (altered.team, altered.models, altered.plan) == ("red", ("m",), "free")
    altered = store.alter(made.id, KeyChange("new", None, (), None, None, ()))
    assert (altered.alias, altered.team, altered.models, altered.expires_ns, altered.plan, altered.tags) == (
        "new", None, (), None, None, (),
    )  # fmt: skip
    assert store.find(digest(secret)) == store.show("new") == altered
    assert altered.limits == Limits(9, 6)
    store.alter("new", KeyChange(alias="new", team="blue"))  # its own alias is no other's
    with pytest.raises(AliasInUse):
        store.alter("new", KeyChange(alias="other"))
    with pytest.raises(ValueError, match="requests_per_minute = 0"):
        store.alter("new", KeyChange(limits={"requests_per_minute": 0}))
    with pytest.raises(ValueError, match="printable"):
        store.alter("new", KeyChange(alias="a\nb"))
    with pytest.raises(KeyNotFound):
        store.alter("nobody", KeyChange(team="x"))
    assert store.show("new").team == "blue"
    store.revoke("other")
    assert store.alter("new", KeyChange(alias="other")).id == made.id  # an ended key's alias is free
    store.revoke(made.id)
    with pytest.raises(ValueError, match="revoked"):
        store.alter(made.id, KeyChange(team="x"))


def test_no_secret_is_in_redis(tmp_path, redis_alone) -> None:
    secret, _ = store_of("redis", tmp_path, redis_alone).create(NewKey("app"))
    client = redis_alone.client()
    held = b"".join(b"".join(client.hgetall(name)) + b"".join(client.hgetall(name).values()) for name in
                    (b"tokenline:keys", b"tokenline:digests"))  # fmt: skip
    assert held
    assert secret.encode() not in held


def test_a_record_shows_no_digest() -> None:
    record = KeyRecord("key_1", "app", b"secret-hash", 0, previous_digest=b"older-hash")
    assert "hash" not in str(record.public())
