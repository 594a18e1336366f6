"""What can happen to a key, whatever keeps it: made, altered, rotated, revoked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from gateway.keys.record import KeyRecord, NewKey
from gateway.keys.secret import digest, new_secret
from protocol.ids import new_span_id

MAX_GRACE_SECONDS = 90 * 86_400


class KeyChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What becomes different about a key; what is left out stays as it is, None takes away."""

    alias: str | UnsetType = UNSET
    team: str | UnsetType | None = UNSET
    models: tuple[str, ...] | UnsetType = UNSET
    expires_ns: int | UnsetType | None = UNSET
    plan: str | UnsetType | None = UNSET
    tags: tuple[str, ...] | UnsetType = UNSET
    limits: Mapping[str, int | None] = {}
    """By name; those that are not there stay."""


class StoreUnreachable(OSError):
    """The store is elsewhere and can't be asked."""


class KeyNotFound(LookupError):
    """No key has this id or alias."""


class AliasInUse(ValueError):
    """A key that still works has this alias already."""


def key_not_found(id_or_alias: str) -> KeyNotFound:
    """The error of a name that no key has."""
    return KeyNotFound(f"no key has the id or alias {id_or_alias!r}")


def alias_in_use(alias: str) -> AliasInUse:
    """The error of a second key with the alias of one that works."""
    return AliasInUse(f"a key with the alias {alias!r} exists; revoke it first or take another alias")


def made(new: NewKey, now_ns: int) -> tuple[str, KeyRecord]:
    """(secret, record) of a new key."""
    secret = new_secret()
    record = KeyRecord(
        id=f"key_{new_span_id()}",
        alias=new.alias,
        digest=digest(secret),
        created_ns=now_ns,
        team=new.team,
        models=tuple(new.models),
        expires_ns=new.expires_ns,
        plan=new.plan,
        limits=new.limits,
        tags=tuple(new.tags),
    )
    return secret, record


def altered(record: KeyRecord, change: KeyChange, others: Iterable[KeyRecord]) -> KeyRecord:
    """The record of a key with other properties; its id and secret stay. Raises ValueError for what no key can have,
    AliasInUse for the alias of one of the others that works."""
    if record.revoked_ns is not None:
        raise ValueError(f"the key {record.alias!r} has been revoked; make a new one instead")
    fields: dict[str, Any] = {
        name: value
        for name, value in msgspec.structs.asdict(change).items()
        if name != "limits" and not isinstance(value, UnsetType)
    }
    if change.limits:
        fields["limits"] = msgspec.structs.replace(record.limits, **change.limits)
    found = msgspec.structs.replace(record, **fields)
    # The same checks as for a new key.
    NewKey(found.alias, found.team, found.models, found.expires_ns, found.plan, found.limits, found.tags)
    if any(other.alias == found.alias and other.id != found.id and other.revoked_ns is None for other in others):
        raise alias_in_use(found.alias)
    return found


def rotated(record: KeyRecord, grace_seconds: float, now_ns: int) -> tuple[str, KeyRecord]:
    """(new secret, record). Only the secret before this one works on; one of an earlier rotation ends now."""
    if record.revoked_ns is not None:
        raise ValueError(f"the key {record.alias!r} has been revoked; make a new one instead")
    if not 0 <= grace_seconds <= MAX_GRACE_SECONDS:
        raise ValueError(f"the grace period must be from 0 to {MAX_GRACE_SECONDS // 86_400} days")
    secret = new_secret()
    return secret, msgspec.structs.replace(
        record,
        digest=digest(secret),
        rotated_ns=now_ns,
        previous_digest=record.digest,
        previous_until_ns=now_ns + round(grace_seconds * 1e9),
    )


def revoked(record: KeyRecord, now_ns: int) -> KeyRecord:
    """The record of a key that works no more."""
    return msgspec.structs.replace(record, revoked_ns=now_ns)
