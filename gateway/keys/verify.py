"""Verifying a key on every request without asking the store on every request.

A verified key is served from memory. Whoever watches the store says every second or two that nothing has changed
(`confirm`), and then no request waits for a look-up. Without that word a key is looked up again beside the request
after REFRESH_NS and before it after STALE_NS, so a revoked key stops in at most STALE_NS. While the store is down, keys
verified before are served for OUTAGE_NS, without waiting for it, and unknown ones get 503, never 401.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from gateway.keys.credentials import unknown_key
from gateway.keys.record import KeyRecord
from gateway.keys.secret import digest
from gateway.keys.sparing import Sparing
from protocol.errors import ApiError
from tracing.clock import Clock

REFRESH_NS = 2_500_000_000
STALE_NS = 4_500_000_000
RETRY_NS = 1_000_000_000
"""Between two look-ups beside requests while the store is down."""
OUTAGE_NS = 300_000_000_000
MAX_CACHED = 50_000
MAX_UNKNOWN = 10_000

log = logging.getLogger("tokenline.keys")

Find = Callable[[bytes], KeyRecord | None]
"""Blocking look-up by SHA-256; raises when the store can't be asked."""


class _Entry(msgspec.Struct):
    record: KeyRecord | None
    verified_ns: int


class KeyVerifier:
    """Answers whose key a secret is. `bootstrap` is the configured key: any form, never stored."""

    def __init__(self, find: Find, clock: Clock, bootstrap: str | None = None) -> None:
        self._find = find
        self._clock = clock
        self.set_bootstrap(bootstrap)
        self._known: OrderedDict[bytes, _Entry] = OrderedDict()
        self._unknown: OrderedDict[bytes, _Entry] = OrderedDict()
        self._lookups: dict[bytes, asyncio.Task[KeyRecord | None]] = {}
        self._changed_ns = 0
        self._confirmed_ns = 0
        self._is_down = False
        self._tried_ns = 0
        self._sparing = Sparing(clock)

    def set_bootstrap(self, bootstrap: str | None) -> None:
        """The configured key from now on."""
        self._bootstrap = digest(bootstrap) if bootstrap else None
        self._bootstrap_record = KeyRecord("key_bootstrap", "bootstrap", self._bootstrap or b"", 0)

    def confirm(self, since_ns: int) -> None:
        """The store has not changed up to `since_ns`: what was verified after the last change is as good as new."""
        self._confirmed_ns = since_ns
        self._is_down = False

    def outage(self) -> None:
        """The store can't be asked now."""
        self._is_down = True

    def invalidate(self) -> None:
        """The store has changed: what was verified before now ages as if nobody watched."""
        self._changed_ns = self._clock.mono_ns()

    async def verify(self, secret: str) -> KeyRecord:
        """The record of a key that works now. Raises ApiError 401 (unknown, revoked, expired) or 503 (store down)."""
        secret_digest = digest(secret)
        if self._bootstrap is not None and hmac.compare_digest(secret_digest, self._bootstrap):
            return self._bootstrap_record
        entry = self._known.get(secret_digest) or self._unknown.get(secret_digest)
        age = self._age_ns(entry) if entry else 0
        if entry is not None and age > STALE_NS and self._is_down and entry.record and age < OUTAGE_NS:
            self._retry(secret_digest)
            record: KeyRecord | None = entry.record
        elif entry is None or age > STALE_NS:
            record = await self._look_up(secret_digest, entry)
        else:
            record = entry.record
            if age > REFRESH_NS:
                self._start_lookup(secret_digest)
        if record is None:
            raise unknown_key(secret)
        return self._usable(record, secret_digest)

    def _age_ns(self, entry: _Entry) -> int:
        known = entry.verified_ns
        if known > self._changed_ns:
            known = max(known, self._confirmed_ns)
        return self._clock.mono_ns() - known

    def _retry(self, secret_digest: bytes) -> None:
        """Asks a store that is down, beside the request and not too often."""
        now = self._clock.mono_ns()
        if now - self._tried_ns >= RETRY_NS:
            self._tried_ns = now
            self._start_lookup(secret_digest)

    def _usable(self, record: KeyRecord, secret_digest: bytes) -> KeyRecord:
        if record.revoked_ns is not None:
            raise ApiError(401, "revoked_key", f"The key {record.alias!r} has been revoked. Use another key.")
        if record.expires_ns is not None and record.expires_ns <= self._clock.wall_ns():
            raise ApiError(401, "expired_key", f"The key {record.alias!r} has expired. Ask for a new one.")
        over_ns = record.previous_until_ns
        is_over = over_ns is not None and over_ns <= self._clock.wall_ns()
        if is_over and not hmac.compare_digest(record.digest, secret_digest):
            text = f"The key {record.alias!r} was rotated, and its old secret works no more. Use the new one."
            raise ApiError(401, "expired_key", text)
        return record

    async def _look_up(self, secret_digest: bytes, entry: _Entry | None) -> KeyRecord | None:
        if self._is_down and self._clock.mono_ns() - self._tried_ns < RETRY_NS:
            raise _unverifiable()
        try:
            self._tried_ns = self._clock.mono_ns()
            return await asyncio.shield(self._start_lookup(secret_digest))
        except Exception as error:
            self._is_down = True
            if entry and entry.record and self._age_ns(entry) < OUTAGE_NS:
                return entry.record
            raise _unverifiable() from error

    def _start_lookup(self, secret_digest: bytes) -> asyncio.Task[KeyRecord | None]:
        """One look-up a key at a time, in a thread; everybody who asks meanwhile shares it."""
        task = self._lookups.get(secret_digest)
        if task is None:
            task = asyncio.create_task(self._refresh(secret_digest))
            self._lookups[secret_digest] = task
            task.add_done_callback(lambda done: self._finished(secret_digest, done))
        return task

    def _finished(self, secret_digest: bytes, task: asyncio.Task[KeyRecord | None]) -> None:
        del self._lookups[secret_digest]
        if not task.cancelled() and (error := task.exception()) and self._sparing.due():
            log.warning("the key store could not be asked: %s", error)

    async def _refresh(self, secret_digest: bytes) -> KeyRecord | None:
        # As of before the look-up: a change that happens meanwhile must make this entry old.
        asked_ns = self._clock.mono_ns()
        record = await asyncio.to_thread(self._find, secret_digest)
        self._is_down = False
        if record is not None and not record.has_digest(secret_digest):
            record = None
        kept, other, limit = (
            (self._known, self._unknown, MAX_CACHED) if record else (self._unknown, self._known, MAX_UNKNOWN)
        )
        other.pop(secret_digest, None)
        kept[secret_digest] = _Entry(record, asked_ns)
        kept.move_to_end(secret_digest)
        if len(kept) > limit:
            kept.popitem(last=False)
        return record


def _unverifiable() -> ApiError:
    return ApiError(503, "upstream_unavailable", "Keys can't be verified right now. Try again shortly.", retry_after=2)
