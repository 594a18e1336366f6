"""A worker's access to the key store: look-ups in threads, and a watch that keeps verified keys fresh without them."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from pathlib import Path

from gateway.keys.record import KeyRecord
from gateway.keys.store import KeyStore, StoreWatch
from gateway.keys.verify import KeyVerifier
from tracing.clock import Clock

WATCH_SECONDS = 1.0

log = logging.getLogger("tokenline.keys")


class StoredKeys:
    """The store, opened when it is first needed and anew after a failure. Every method blocks."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._store: KeyStore | None = None
        self._watch: StoreWatch | None = None

    def find(self, secret_digest: bytes) -> KeyRecord | None:
        """The key with this SHA-256. Raises sqlite3.Error or OSError."""
        try:
            self._store = self._store or KeyStore(self._path)
            return self._store.find(secret_digest)
        except (sqlite3.Error, OSError):
            self._store = None
            raise

    def changed(self) -> bool:
        """Whether any key may have changed since the last call. Raises sqlite3.Error or OSError."""
        try:
            if self._watch is None:
                self._watch = KeyStore(self._path).watch()
                return True
            return self._watch.changed()
        except (sqlite3.Error, OSError):
            self._watch = None
            raise


async def watch_store(keys: StoredKeys, verifier: KeyVerifier, clock: Clock) -> None:
    """Tells the verifier every second whether the store has changed, until cancelled."""
    while True:
        asked_ns = clock.mono_ns()
        try:
            if await asyncio.to_thread(keys.changed):
                verifier.invalidate()
            verifier.confirm(asked_ns)
        except (sqlite3.Error, OSError) as error:
            log.warning("the key store can't be watched: %s", error)
        await asyncio.sleep(WATCH_SECONDS)
