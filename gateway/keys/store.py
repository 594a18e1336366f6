"""Keys in a SQLite file, shared by every process of one state folder. Blocking: the hot path goes through `verify`."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from msgspec import UnsetType

from gateway.keys.changes import KeyChange, alias_in_use, altered, key_not_found, made, revoked, rotated
from gateway.keys.limits import Limits
from gateway.keys.record import KeyRecord, NewKey
from gateway.keys.schema import bring_up

_COLUMNS = KeyRecord.__struct_fields__
_NAMES = ", ".join(_COLUMNS)
_PLACES = ", ".join("?" * len(_COLUMNS))
_AS_JSON = frozenset({"models", "limits", "tags"})


class KeyStore:
    """Creates, lists, finds, alters, rotates and revokes keys. Raises sqlite3.Error when the file can't be used."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._connection() as db:
            db.execute("PRAGMA journal_mode = WAL")
            bring_up(db)
        path.chmod(0o600)

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        """A connection of the calling thread's own, committed and closed at the end."""
        db = sqlite3.connect(self._path, timeout=2)
        try:
            with db:
                yield db
        finally:
            db.close()

    def create(self, new: NewKey) -> tuple[str, KeyRecord]:
        """A new key: (secret, record). Raises AliasInUse."""
        secret, record = made(new, time.time_ns())
        with self._connection() as db:
            db.execute("BEGIN IMMEDIATE")
            if db.execute("SELECT 1 FROM keys WHERE alias = ? AND revoked_ns IS NULL", (new.alias,)).fetchone():
                raise alias_in_use(new.alias)
            db.execute(f"INSERT INTO keys ({_NAMES}) VALUES ({_PLACES})", _row(record))  # noqa: S608  constants only
        return secret, record

    def list(self) -> list[KeyRecord]:
        """Every key, newest first, revoked ones included."""
        with self._connection() as db:
            rows = db.execute(f"SELECT {_NAMES} FROM keys ORDER BY created_ns DESC").fetchall()  # noqa: S608
        return [_record(row) for row in rows]

    def find(self, secret_digest: bytes) -> KeyRecord | None:
        """The key whose secret has, or had before its last rotation, this SHA-256."""
        with self._connection() as db:
            row = db.execute(
                f"SELECT {_NAMES} FROM keys WHERE digest = ?1 OR previous_digest = ?1",  # noqa: S608
                (secret_digest,),
            ).fetchone()
        return _record(row) if row else None

    def show(self, id_or_alias: str) -> KeyRecord:
        """The key with this id, else with this alias; of several the one that works. Raises KeyNotFound."""
        with self._connection() as db:
            return self._named(db, id_or_alias)

    def alter(self, id_or_alias: str, change: KeyChange) -> KeyRecord:
        """Changes what a key may do. Raises KeyNotFound, AliasInUse, ValueError."""
        with self._connection() as db:
            db.execute("BEGIN IMMEDIATE")
            before = self._named(db, id_or_alias)
            alias = before.alias if isinstance(change.alias, UnsetType) else change.alias
            same_alias = db.execute(f"SELECT {_NAMES} FROM keys WHERE alias = ?", (alias,)).fetchall()  # noqa: S608
            record = altered(before, change, map(_record, same_alias))
            self._write(db, record)
        return record

    def rotate(self, id_or_alias: str, grace_seconds: float) -> tuple[str, KeyRecord]:
        """A new secret for a key: (secret, record); the old one works on for the grace period. Raises KeyNotFound,
        ValueError for a revoked key."""
        with self._connection() as db:
            db.execute("BEGIN IMMEDIATE")
            secret, record = rotated(self._named(db, id_or_alias), grace_seconds, time.time_ns())
            self._write(db, record)
        return secret, record

    def revoke(self, id_or_alias: str) -> KeyRecord:
        """Ends a key, for good. Revoking twice keeps the first time. Raises KeyNotFound."""
        with self._connection() as db:
            db.execute("BEGIN IMMEDIATE")
            record = self._named(db, id_or_alias)
            if record.revoked_ns is None:
                record = revoked(record, time.time_ns())
                self._write(db, record)
        return record

    def watch(self) -> StoreWatch:
        """Something that tells cheaply whether any key has changed."""
        return StoreWatch(self._path)

    def _named(self, db: sqlite3.Connection, id_or_alias: str) -> KeyRecord:
        row = db.execute(
            f"SELECT {_NAMES} FROM keys WHERE id = ?1 OR alias = ?1 "  # noqa: S608
            "ORDER BY id <> ?1, revoked_ns IS NOT NULL, created_ns DESC",
            (id_or_alias,),
        ).fetchone()
        if row is None:
            raise key_not_found(id_or_alias)
        return _record(row)

    def _write(self, db: sqlite3.Connection, record: KeyRecord) -> None:
        db.execute(f"REPLACE INTO keys ({_NAMES}) VALUES ({_PLACES})", _row(record))  # noqa: S608


class StoreWatch:
    """Answers whether the file was written to since it was last asked (SQLite's data_version). One thread at a time."""

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, timeout=2, check_same_thread=False)
        self._version = self._read()

    def changed(self) -> bool:
        """True once after each change. Raises sqlite3.Error."""
        version, self._version = self._version, self._read()
        return version != self._version

    def close(self) -> None:
        """Lets go of the file."""
        self._db.close()

    def _read(self) -> int:
        return int(self._db.execute("PRAGMA data_version").fetchone()[0])


def _row(record: KeyRecord) -> tuple[object, ...]:
    fields = msgspec.structs.asdict(record)
    return tuple(msgspec.json.encode(value).decode() if name in _AS_JSON else value for name, value in fields.items())


def _record(row: tuple[object, ...]) -> KeyRecord:
    fields = dict(zip(_COLUMNS, row, strict=True))
    fields["models"] = msgspec.json.decode(str(fields["models"]), type=tuple[str, ...])
    fields["limits"] = msgspec.json.decode(str(fields["limits"]), type=Limits)
    fields["tags"] = msgspec.json.decode(str(fields["tags"]), type=tuple[str, ...])
    return msgspec.convert(fields, KeyRecord)
