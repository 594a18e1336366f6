"""A worker's access to the key store: look-ups in threads, and a watch that keeps verified keys fresh without them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from gateway.keys.record import KeyRecord
from gateway.keys.sparing import Sparing
from gateway.keys.stores import STORE_ERRORS, Keys, Watch
from gateway.keys.verify import KeyVerifier
from tracing.clock import Clock

WATCH_SECONDS = 1.0

log = logging.getLogger("tokenline.keys")


class StoredKeys:
    """The store, opened when it is first needed and anew after a failure. Every method blocks."""

    def __init__(self, open_store: Callable[[], Keys]) -> None:
        self._open = open_store
        self._store: Keys | None = None
        self._watch: Watch | None = None

    def find(self, secret_digest: bytes) -> KeyRecord | None:
        """The key with this SHA-256. Raises one of STORE_ERRORS."""
        try:
            self._store = self._store or self._open()
            return self._store.find(secret_digest)
        except STORE_ERRORS:
            self._store = None
            raise

    def changed(self) -> bool:
        """Whether any key may have changed since the last call. Raises one of STORE_ERRORS."""
        try:
            if self._watch is None:
                self._watch = self._open().watch()
                return True
            return self._watch.changed()
        except STORE_ERRORS:
            self._watch = None
            raise


async def watch_store(keys: StoredKeys, verifier: KeyVerifier, clock: Clock) -> None:
    """Tells the verifier every second whether the store has changed, until cancelled."""
    sparing = Sparing(clock)
    while True:
        asked_ns = clock.mono_ns()
        try:
            if await asyncio.to_thread(keys.changed):
                verifier.invalidate()
            verifier.confirm(asked_ns)
        except STORE_ERRORS as error:
            verifier.outage()
            if sparing.due():
                log.warning("the key store can't be watched: %s", error)
        await asyncio.sleep(WATCH_SECONDS)
