"""Tokens used in the current day and month by key, in memory and in a SQLite file, so that a restart forgets nothing.

What is added goes to the file every `flush_seconds`, beside requests: a crash loses at most that much, an ordered end
nothing. Workers of one state folder add to the same rows and learn of each other's sums when they flush: of those keys
that they were asked about since the last time.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Iterable
from pathlib import Path

from gateway.keys.sparing import Sparing
from gateway.limits.periods import Calendar
from tracing.clock import Clock

MAX_WAITING = 100_000
"""Sums that wait for a file that can't be written; further keys are counted in memory alone."""
_TABLE = """
CREATE TABLE IF NOT EXISTS budgets (
  key_id TEXT NOT NULL,
  period TEXT NOT NULL,
  tokens INTEGER NOT NULL,
  PRIMARY KEY (key_id, period)
) STRICT, WITHOUT ROWID
"""

log = logging.getLogger("tokenline.limits")

Entry = tuple[str, str]
"""A key's id and a period."""


class Budgets:
    """What was used; `keep` runs beside requests."""

    def __init__(self, path: Path, clock: Clock, flush_seconds: float, *, is_shared: bool = False) -> None:
        """`is_shared`: other processes add to the file, too."""
        self._path = path
        self._clock = clock
        self._flush_seconds = flush_seconds
        self._calendar = Calendar()
        self._used: dict[Entry, int] = {}
        self._waiting: dict[Entry, int] = {}
        self._asked: set[Entry] | None = set() if is_shared else None
        self._current: tuple[str, str] = ("", "")
        self._sparing = Sparing(clock)

    def used(self, key_id: str, period: str) -> int:
        """Tokens of a key in a period."""
        entry = (key_id, period)
        if self._asked is not None:
            self._asked.add(entry)
        return self._used.get(entry, 0)

    def add(self, key_id: str, period: str, tokens: int) -> None:
        """More tokens."""
        entry = (key_id, period)
        self._used[entry] = self._used.get(entry, 0) + tokens
        if entry in self._waiting or len(self._waiting) < MAX_WAITING:
            self._waiting[entry] = self._waiting.get(entry, 0) + tokens

    async def keep(self) -> None:
        """Flushes for as long as it is let."""
        while True:
            await asyncio.sleep(self._flush_seconds)
            await self.flush()

    async def load(self) -> None:
        """Reads what earlier processes wrote of the current day and month."""
        periods = self._calendar.at(self._clock.wall_ns())
        self._take(await self._trying({}, (periods.day, periods.month)))

    async def flush(self) -> None:
        """Writes what was added since the last time; what can't be written waits for the next."""
        periods = self._calendar.at(self._clock.wall_ns())
        current = (periods.day, periods.month)
        if self._waiting or self._asked or current != self._current:
            waiting, self._waiting = self._waiting, {}
            asked = self._asked or set()
            if self._asked is not None:
                self._asked = set()
            self._take(await self._trying(waiting, current, asked))
        if current != self._current:
            self._current = current
            self._used = {entry: tokens for entry, tokens in self._used.items() if entry[1] in current}

    def _take(self, sums: dict[Entry, int]) -> None:
        for entry, tokens in sums.items():
            self._used[entry] = tokens + self._waiting.get(entry, 0)  # what was added while the file was written

    async def _trying(
        self, added: dict[Entry, int], current: tuple[str, str], asked: Iterable[Entry] = ()
    ) -> dict[Entry, int]:
        try:
            return await asyncio.to_thread(self._write, added, current, asked)
        except (sqlite3.Error, OSError) as error:
            for entry, tokens in added.items():
                self._waiting[entry] = self._waiting.get(entry, 0) + tokens
            if self._sparing.due():
                log.warning("token budgets can't be written to %s: %s", self._path, error)
            return {}

    def _write(self, added: dict[Entry, int], current: tuple[str, str], asked: Iterable[Entry]) -> dict[Entry, int]:
        """Adds to the file and forgets past periods; the sums of what was added or asked, or all when nothing was."""
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        db = sqlite3.connect(self._path, timeout=2)
        try:
            db.execute("PRAGMA journal_mode = WAL")
            with db:
                db.execute(_TABLE)
                db.execute("DELETE FROM budgets WHERE period NOT IN (?, ?)", current)
                sums = {
                    entry: db.execute(
                        "INSERT INTO budgets VALUES (?, ?, ?) ON CONFLICT DO UPDATE "
                        "SET tokens = tokens + excluded.tokens RETURNING tokens",
                        (*entry, tokens),
                    ).fetchone()[0]
                    for entry, tokens in added.items()
                    if entry[1] in current
                }
                for entry in asked:
                    found = db.execute("SELECT tokens FROM budgets WHERE key_id = ? AND period = ?", entry).fetchone()
                    sums |= {entry: found[0]} if found else {}
                if not added and not asked:
                    rows = db.execute("SELECT key_id, period, tokens FROM budgets").fetchall()
                    sums = {(key_id, period): tokens for key_id, period, tokens in rows}
        finally:
            db.close()
        self._path.chmod(0o600)
        return sums
