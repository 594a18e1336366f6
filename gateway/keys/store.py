"""Keys in a SQLite file, shared by every process of one state folder. Blocking: the hot path goes through `verify`."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from gateway.keys.record import KeyRecord
from gateway.keys.secret import digest, new_secret
from protocol.ids import new_span_id

_SCHEMA = """
CREATE TABLE IF NOT EXISTS keys (
  id TEXT PRIMARY KEY,
  alias TEXT NOT NULL,
  digest BLOB NOT NULL UNIQUE,
  created_ns INTEGER NOT NULL,
  team TEXT,
  models TEXT NOT NULL DEFAULT '[]',
  expires_ns INTEGER,
  revoked_ns INTEGER
) STRICT;
"""
_COLUMNS = "id, alias, digest, created_ns, team, models, expires_ns, revoked_ns"


class KeyNotFound(LookupError):
    """No key has this id or alias."""


class AliasInUse(ValueError):
    """A key that still works has this alias already."""


class KeyStore:
    """Creates, lists, finds and revokes keys. Raises sqlite3.Error when the file can't be used."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._connection() as db:
            db.execute("PRAGMA journal_mode = WAL")
            db.executescript(_SCHEMA)
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

    def create(
        self,
        alias: str,
        team: str | None = None,
        models: tuple[str, ...] = (),
        expires_ns: int | None = None,
    ) -> tuple[str, KeyRecord]:
        """A new key: (secret, record). Raises AliasInUse, or ValueError for an alias that is empty or too long."""
        if not alias.strip() or len(alias) > 128 or not alias.isprintable():
            raise ValueError("alias must be 1 to 128 printable characters")
        secret = new_secret()
        record = KeyRecord(
            id=f"key_{new_span_id()}",
            alias=alias,
            digest=digest(secret),
            created_ns=time.time_ns(),
            team=team,
            models=tuple(models),
            expires_ns=expires_ns,
        )
        with self._connection() as db:
            db.execute("BEGIN IMMEDIATE")
            if db.execute("SELECT 1 FROM keys WHERE alias = ? AND revoked_ns IS NULL", (alias,)).fetchone():
                raise AliasInUse(f"a key with the alias {alias!r} exists; revoke it first or take another alias")
            db.execute(
                f"INSERT INTO keys ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",  # noqa: S608  constants only
                (
                    record.id,
                    alias,
                    record.digest,
                    record.created_ns,
                    team,
                    msgspec.json.encode(record.models).decode(),
                    expires_ns,
                    None,
                ),
            )
        return secret, record

    def list(self) -> list[KeyRecord]:
        """Every key, newest first, revoked ones included."""
        with self._connection() as db:
            rows = db.execute(f"SELECT {_COLUMNS} FROM keys ORDER BY created_ns DESC").fetchall()  # noqa: S608
        return [_record(row) for row in rows]

    def find(self, secret_digest: bytes) -> KeyRecord | None:
        """The key whose secret has this SHA-256."""
        with self._connection() as db:
            row = db.execute(
                f"SELECT {_COLUMNS} FROM keys WHERE digest = ?",  # noqa: S608
                (secret_digest,),
            ).fetchone()
        return _record(row) if row else None

    def revoke(self, id_or_alias: str) -> KeyRecord:
        """Ends a key, for good. Revoking twice keeps the first time. Raises KeyNotFound."""
        with self._connection() as db:
            db.execute("BEGIN IMMEDIATE")
            row = db.execute(
                f"SELECT {_COLUMNS} FROM keys WHERE id = ? OR alias = ? "  # noqa: S608
                "ORDER BY revoked_ns IS NOT NULL, created_ns DESC",
                (id_or_alias, id_or_alias),
            ).fetchone()
            if row is None:
                raise KeyNotFound(f"no key has the id or alias {id_or_alias!r}")
            record = _record(row)
            if record.revoked_ns is not None:
                return record
            now = time.time_ns()
            db.execute("UPDATE keys SET revoked_ns = ? WHERE id = ?", (now, record.id))
        return msgspec.structs.replace(record, revoked_ns=now)

    def watch(self) -> StoreWatch:
        """Something that tells cheaply whether any key has changed."""
        return StoreWatch(self._path)


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


def _record(row: tuple[object, ...]) -> KeyRecord:
    fields = dict(zip(_COLUMNS.split(", "), row, strict=True))
    fields["models"] = msgspec.json.decode(str(fields["models"]), type=tuple[str, ...])
    return msgspec.convert(fields, KeyRecord)
