"""The store's tables, and opening them: a new file, one of this version, or one that a crash or a stranger left."""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from pathlib import Path

BUSY_TIMEOUT_SECONDS = 2.0

_FIRST = """
CREATE TABLE schema_version (version INTEGER NOT NULL);
CREATE TABLE requests (
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  request_id TEXT NOT NULL,
  client_request_id TEXT,
  trace_id TEXT NOT NULL,
  started_ns INTEGER NOT NULL,
  model TEXT NOT NULL,
  upstream TEXT NOT NULL,
  surface TEXT NOT NULL,
  key_alias TEXT,
  team TEXT,
  outcome TEXT NOT NULL,
  status INTEGER NOT NULL,
  ttft_ms REAL,
  tpot_ms REAL,
  e2e_ms REAL,
  slow_ms REAL,
  dominant TEXT,
  kept INTEGER NOT NULL,
  body BLOB NOT NULL
);
CREATE INDEX requests_by_request_id ON requests (request_id);
CREATE INDEX requests_by_client_request_id ON requests (client_request_id) WHERE client_request_id IS NOT NULL;
CREATE INDEX requests_by_trace_id ON requests (trace_id);
CREATE INDEX requests_by_time ON requests (started_ns);
CREATE INDEX requests_by_slowness ON requests (slow_ms) WHERE slow_ms IS NOT NULL;
CREATE INDEX requests_by_model ON requests (model, started_ns);
CREATE INDEX requests_by_outcome ON requests (outcome, started_ns) WHERE outcome <> 'ok';
CREATE TABLE traces (
  seq INTEGER PRIMARY KEY AUTOINCREMENT,
  trace_id TEXT NOT NULL UNIQUE,
  stand_ins_left INTEGER NOT NULL
);
CREATE TABLE spans (id INTEGER PRIMARY KEY, trace_seq INTEGER NOT NULL, body BLOB NOT NULL);
CREATE INDEX spans_by_trace ON spans (trace_seq);
"""
"""Version 1. `spans` holds what engines sent; the gateway's own are made from the request's ledger when asked for."""

MIGRATIONS = {
    1: """
ALTER TABLE traces ADD COLUMN kept_ns INTEGER NOT NULL DEFAULT 0;
UPDATE traces SET kept_ns = coalesce(
  (SELECT max(started_ns) FROM requests WHERE requests.trace_id = traces.trace_id),
  (SELECT max(started_ns) FROM requests), 0);
CREATE INDEX traces_by_time ON traces (kept_ns);
DROP INDEX requests_by_slowness;
CREATE INDEX requests_by_slowness ON requests (slow_ms, started_ns) WHERE slow_ms IS NOT NULL;
CREATE INDEX requests_by_ttft ON requests (ttft_ms, started_ns) WHERE ttft_ms IS NOT NULL;
CREATE INDEX requests_by_e2e ON requests (e2e_ms, started_ns) WHERE e2e_ms IS NOT NULL;
CREATE INDEX requests_by_key ON requests (key_alias, started_ns) WHERE key_alias IS NOT NULL;
CREATE INDEX requests_by_stage ON requests (dominant, started_ns) WHERE dominant IS NOT NULL;
""",
}
"""Version -> what makes the next one of it. A new file is brought up from version 1 in the same way, so that there is
one schema. `kept_ns`: wall time at which the trace was kept, which its age counts from."""

VERSION = max(MIGRATIONS) + 1

log = logging.getLogger("tokenline.observer.store")


class StoreError(RuntimeError):
    """The store cannot be opened; the message names the file and what to do."""


def connect(path: Path) -> sqlite3.Connection:
    """A connection in autocommit mode; its user owns the locking (one thread at a time)."""
    connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_SECONDS, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("PRAGMA cache_size = -16000")
    return connection


def open_database(path: Path) -> sqlite3.Connection:
    """The database at `path`, made when absent. A file that is no database is moved aside, never deleted."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.touch(mode=0o600)
        return _open(path)
    except (sqlite3.OperationalError, OSError) as error:
        raise StoreError(f"the trace store {path} cannot be opened: {error}") from error
    except sqlite3.DatabaseError as error:
        aside = path.with_name(path.name + ".damaged")
        log.error("the trace store %s is damaged (%s); it was moved to %s and a new one begun", path, error, aside)
        path.replace(aside)
        for suffix in ("-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        return _open(path)


def _open(path: Path) -> sqlite3.Connection:
    connection = connect(path)
    try:
        # The file is looked at under the lock, so that two processes do not both bring it up.
        connection.execute("BEGIN IMMEDIATE")
        found = _version(connection)
        if found is not None and found > VERSION:
            raise StoreError(
                f"the trace store {path} has schema version {found}, this version of tokenline reads {VERSION}; "
                "move the file away or use the version that wrote it"
            )
        _bring_up(connection, found, path)
        connection.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            connection.close()
        raise
    return connection


def _bring_up(connection: sqlite3.Connection, found: int | None, path: Path) -> None:
    """Makes a file of any earlier version, or an empty one, one of VERSION; all of it or nothing."""
    if found == VERSION:
        return
    if found is None:
        _run(connection, _FIRST)
        connection.execute("INSERT INTO schema_version VALUES (1)")
    else:
        log.info("the trace store %s is brought from schema version %d to %d", path, found, VERSION)
    for version in range(found or 1, VERSION):
        _run(connection, MIGRATIONS[version])
    connection.execute("UPDATE schema_version SET version = ?", (VERSION,))


def _run(connection: sqlite3.Connection, script: str) -> None:
    # Not `executescript`, which ends the transaction that it finds.
    for statement in script.strip().split(";\n"):
        connection.execute(statement)


def _version(connection: sqlite3.Connection) -> int | None:
    """The schema version; None for a file without tables."""
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if "schema_version" not in tables:
        return None
    (version,) = connection.execute("SELECT version FROM schema_version").fetchone()
    return int(version)
