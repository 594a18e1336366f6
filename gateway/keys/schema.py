"""The table of keys, and what brings a file of an earlier version up to it."""

from __future__ import annotations

import sqlite3

_FIRST = """
CREATE TABLE IF NOT EXISTS keys (
  id TEXT PRIMARY KEY,
  alias TEXT NOT NULL,
  digest BLOB NOT NULL UNIQUE,
  created_ns INTEGER NOT NULL,
  team TEXT,
  models TEXT NOT NULL DEFAULT '[]',
  expires_ns INTEGER,
  revoked_ns INTEGER
) STRICT
"""
"""The first version, which wrote no version number (user_version 0)."""

_MIGRATIONS = (
    (
        _FIRST,
        "ALTER TABLE keys ADD COLUMN plan TEXT",
        "ALTER TABLE keys ADD COLUMN limits TEXT NOT NULL DEFAULT '{}'",
        "ALTER TABLE keys ADD COLUMN tags TEXT NOT NULL DEFAULT '[]'",
        "ALTER TABLE keys ADD COLUMN rotated_ns INTEGER",
        "ALTER TABLE keys ADD COLUMN previous_digest BLOB",
        "ALTER TABLE keys ADD COLUMN previous_until_ns INTEGER",
        "CREATE UNIQUE INDEX keys_by_previous_digest ON keys (previous_digest) WHERE previous_digest IS NOT NULL",
    ),
)
"""Statements that make version n + 1 of version n."""

VERSION = len(_MIGRATIONS)


def bring_up(db: sqlite3.Connection) -> None:
    """Makes or upgrades the table, all or nothing. Raises sqlite3.Error, also for a file of a later version."""
    if _version(db) == VERSION:
        return
    db.execute("BEGIN IMMEDIATE")  # looked at again under the lock: two processes may both come here
    found = _version(db)
    if found > VERSION:
        raise sqlite3.DatabaseError(
            f"its schema has version {found}, this tokenline reads {VERSION}; use the version that wrote it"
        )
    for statements in _MIGRATIONS[found:]:
        for statement in statements:
            db.execute(statement)
    db.execute(f"PRAGMA user_version = {VERSION}")
    db.execute("COMMIT")


def _version(db: sqlite3.Connection) -> int:
    return int(db.execute("PRAGMA user_version").fetchone()[0])
