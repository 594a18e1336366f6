"""Requests and tokens by key and team over time, in a file of their own: they outlive the request rows.

Sums are kept in slots of ten minutes for MAX_AGE_DAYS. What was added goes to the file every few seconds, beside
everything else; whoever reads the file sees the sums of all workers.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from pathlib import Path

import msgspec

from tracing.clock import Clock
from tracing.ledger import Ledger

SLOT_NS = 600_000_000_000
MAX_AGE_DAYS = 62
MAX_WAITING = 20_000
"""Sums that wait to be written; what would be one more is dropped, and said."""
FLUSH_SECONDS = 2.0
_TABLE = """
CREATE TABLE IF NOT EXISTS usage (
  slot INTEGER NOT NULL,
  key_alias TEXT NOT NULL,
  team TEXT NOT NULL,
  model TEXT NOT NULL,
  requests INTEGER NOT NULL,
  refused INTEGER NOT NULL,
  uncounted INTEGER NOT NULL,
  input_tokens INTEGER NOT NULL,
  cached_tokens INTEGER NOT NULL,
  output_tokens INTEGER NOT NULL,
  reasoning_tokens INTEGER NOT NULL,
  PRIMARY KEY (slot, key_alias, team, model)
) STRICT, WITHOUT ROWID
"""
"""`slot`: number of the ten minutes since 1970. `team` '': none."""
_SUMS = ("requests", "refused", "uncounted", "input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens")
_ADD = ", ".join(f"{name} = {name} + excluded.{name}" for name in _SUMS)

log = logging.getLogger("tokenline.observer.usage")


class Sums(msgspec.Struct):
    """What was used. `uncounted`: answers without the upstream's own count; their token events are in output_tokens."""

    requests: int = 0
    refused: int = 0
    uncounted: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0


class UsageBook:
    """Adds up closed requests (`add`, on the event loop) and writes the sums down (`flush`, on any thread)."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self._path = path
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: dict[tuple[int, str, str, str], Sums] = {}
        self._dropped = 0

    def add(self, ledger: Ledger) -> None:
        """Counts a request that had a key."""
        if ledger.key_alias is None:
            return
        entry = (ledger.wall_ns // SLOT_NS, ledger.key_alias, ledger.team or "", ledger.model)
        with self._lock:
            sums = self._waiting.get(entry)
            if sums is None:
                if len(self._waiting) >= MAX_WAITING:
                    self._dropped += 1
                    return
                sums = self._waiting[entry] = Sums()
            _count(sums, ledger)

    def flush(self) -> None:
        """Writes what was added; what can't be written waits."""
        with self._lock:
            waiting, self._waiting = self._waiting, {}
            dropped, self._dropped = self._dropped, 0
        if dropped:
            log.warning("the usage of %d requests was not counted: more than %d sums wait", dropped, MAX_WAITING)
        if not waiting:
            return
        try:
            self._write(waiting)
        except (sqlite3.Error, OSError) as error:
            log.warning("usage can't be written to %s: %s", self._path, error)
            with self._lock:
                for entry, sums in waiting.items():
                    _merge(self._waiting.setdefault(entry, Sums()), sums)

    def _write(self, waiting: dict[tuple[int, str, str, str], Sums]) -> None:
        oldest = (self._clock.wall_ns() - MAX_AGE_DAYS * 86_400_000_000_000) // SLOT_NS
        self._path.touch(mode=0o600)
        db = sqlite3.connect(self._path, timeout=2)
        try:
            db.execute("PRAGMA journal_mode = WAL")
            with db:
                db.execute(_TABLE)
                db.executemany(
                    f"INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET {_ADD}",  # noqa: S608
                    [(*entry, *msgspec.structs.astuple(sums)) for entry, sums in waiting.items()],
                )
                db.execute("DELETE FROM usage WHERE slot < ?", (oldest,))
        finally:
            db.close()


def read_usage(path: Path, since_ns: int, by: tuple[str, ...]) -> list[dict[str, object]]:
    """Sums since the slot that `since_ns` lies in, by columns of the table; the most tokens first.

    Raises sqlite3.Error.
    """
    if not path.exists():
        return []
    columns = ", ".join(by)
    sums = ", ".join(f"sum({name}) AS {name}" for name in _SUMS)
    db = sqlite3.connect(path, timeout=2)
    db.row_factory = sqlite3.Row
    try:
        rows = db.execute(
            f"SELECT {columns}, {sums} FROM usage WHERE slot >= ? GROUP BY {columns} "  # noqa: S608  constants only
            f"ORDER BY sum(input_tokens + output_tokens) DESC, sum(requests) DESC, {columns}",
            (since_ns // SLOT_NS,),
        ).fetchall()
    finally:
        db.close()
    return [dict(row) for row in rows]


def _count(sums: Sums, ledger: Ledger) -> None:
    usage = ledger.usage
    sums.requests += 1
    sums.refused += ledger.status == 429 and not ledger.attempts
    sums.uncounted += usage.source != "usage" and ledger.token_events > 0
    sums.input_tokens += usage.input_tokens or 0
    sums.cached_tokens += usage.cached_tokens or 0
    sums.output_tokens += usage.output_tokens or 0
    sums.reasoning_tokens += usage.reasoning_tokens or 0


def _merge(into: Sums, more: Sums) -> None:
    for name in _SUMS:
        setattr(into, name, getattr(into, name) + getattr(more, name))
