"""What every worker of this machine has counted by key, in memory that all of them can read.

Each worker has a region of a file in the run folder that all map, and writes there alone, so nobody waits for anybody
and no lock can be left behind by one that died. A key's counters are found by a hash of its id, in a bucket of a few
places; a place is given to another key once its own is not in use. Counters outlive their worker: the one that is
started in its stead goes on with them.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

from gateway.limits.window import SLOT_NS, WORDS, SlidingWindow, Words

BUCKETS = 2048
PLACES = 8
"""In a bucket. Together they are the keys that a worker can share counters of at once: more count by themselves."""
_RUNNING = 0
_REQUESTS = 2
_TOKENS = _REQUESTS + WORDS
_PLACE_WORDS = _TOKENS + WORDS
_REGION_WORDS = BUCKETS * PLACES * (1 + _PLACE_WORDS)
"""A region: the hash of each place's key (0: free), then the places."""


class Used:
    """What a key has in use now, at one worker or at several."""

    __slots__ = ("requests", "requests_newest", "running", "tokens", "tokens_newest")

    def __init__(self) -> None:
        self.running = 0
        self.requests = self.tokens = 0
        """In the last minute."""
        self.requests_newest = self.tokens_newest = 0
        """Slots of the last ones."""


class Counters:
    """What one worker counts of one key: requests running, and both windows."""

    __slots__ = ("_words", "hash_at", "requests", "tokens")

    def __init__(self, words: Words | None = None, hash_at: int = -1) -> None:
        self._words = memoryview(bytearray(8 * _PLACE_WORDS)).cast("q") if words is None else words
        self.hash_at = hash_at
        """Where the board keeps whose they are; -1: they are on none."""
        self.requests = SlidingWindow(self._words[_REQUESTS:_TOKENS])
        self.tokens = SlidingWindow(self._words[_TOKENS:_PLACE_WORDS])

    @property
    def running(self) -> int:
        """Requests in flight."""
        return self._words[_RUNNING]

    @running.setter
    def running(self, count: int) -> None:
        self._words[_RUNNING] = count

    def wipe(self) -> None:
        """Nothing was ever counted."""
        self._words[:] = memoryview(bytes(8 * _PLACE_WORDS)).cast("q")

    def add_to(self, used: Used, now_ns: int) -> None:
        """Adds what is counted here."""
        slot = now_ns // SLOT_NS
        running, _, current, requests, newest = self._words[: _REQUESTS + 3].tolist()
        used.running += running
        if requests and (requests := requests if current >= slot else self.requests.seen(now_ns)):
            used.requests += requests
            used.requests_newest = max(used.requests_newest, newest)
        current, tokens, newest = self._words[_TOKENS : _TOKENS + 3].tolist()
        if tokens and (tokens := tokens if current >= slot else self.tokens.seen(now_ns)):
            used.tokens += tokens
            used.tokens_newest = max(used.tokens_newest, newest)

    @property
    def last_used(self) -> int:
        """The newest slot of either window; what is running is in use now."""
        return max(self.requests.newest, self.tokens.newest)


class Board:
    """The regions of all workers; this one's is `worker`'s. Raises OSError when the file can't be used."""

    def __init__(self, path: Path, worker: int, workers: int) -> None:
        size = 8 * _REGION_WORDS * workers
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if os.fstat(descriptor).st_size < size:
                os.ftruncate(descriptor, size)
            if hasattr(os, "posix_fallocate"):
                # Its room is taken now: on a disk that is full later, a write to a mapped page would end this worker.
                os.posix_fallocate(descriptor, 8 * worker * _REGION_WORDS, 8 * _REGION_WORDS)
            self._words: Words = memoryview(mmap.mmap(descriptor, size)).cast("q")
        finally:
            os.close(descriptor)
        self._own = worker * _REGION_WORDS
        self._others = tuple(other * _REGION_WORDS for other in range(workers) if other != worker)
        self._places: dict[int, Counters] = {}
        """By the number of their first word: views, made once."""
        for place in range(BUCKETS * PLACES):
            if self._words[self._own + place]:
                self._counters(self._own, place).running = 0  # what the worker before this one had in flight

    def counters(self, key_hash: int) -> Counters:
        """This worker's counters of a key; where its bucket is full of keys in use, some that nobody else sees."""
        bucket = key_hash % BUCKETS * PLACES
        hashes = self._hashes(self._own, bucket)
        if key_hash in hashes:
            return self._counters(self._own, bucket + hashes.index(key_hash))
        place = self._free(bucket, hashes)
        if place is None:
            return Counters()
        self._words[self._own + place] = 0  # nobody reads it while it changes hands
        found = self._counters(self._own, place)
        found.wipe()
        self._words[self._own + place] = key_hash
        return found

    def others(self, key_hash: int, known: dict[int, Counters]) -> Iterable[Counters]:
        """What other workers count of a key, to be read. `known` remembers where, and is the caller's to keep."""
        bucket = key_hash % BUCKETS * PLACES
        for region in self._others:
            counters = known.get(region)
            if counters is not None:
                if self._words[counters.hash_at] == key_hash:
                    continue
                del known[region]
            hashes = self._hashes(region, bucket)
            if key_hash in hashes:
                known[region] = self._counters(region, bucket + hashes.index(key_hash))
        return known.values()

    def holds(self, key_hash: int, counters: Counters) -> bool:
        """Whether these are still that key's."""
        return counters.hash_at < 0 or self._words[counters.hash_at] == key_hash

    def _free(self, bucket: int, hashes: list[int]) -> int | None:
        """A place that nobody has, else the one that was used longest ago and is not in use."""
        if 0 in hashes:
            return bucket + hashes.index(0)
        resting = [place for place in range(bucket, bucket + PLACES) if not self._counters(self._own, place).running]
        return min(resting, key=lambda place: self._counters(self._own, place).last_used, default=None)

    def _hashes(self, region: int, bucket: int) -> list[int]:
        return self._words[region + bucket : region + bucket + PLACES].tolist()

    def _counters(self, region: int, place: int) -> Counters:
        first = region + BUCKETS * PLACES + place * _PLACE_WORDS
        found = self._places.get(first)
        if found is None:
            found = self._places[first] = Counters(self._words[first : first + _PLACE_WORDS], region + place)
        return found


def hash_of(key_id: str) -> int:
    """64 bits by which a key is known on the board; never 0."""
    digest = hashlib.blake2b(key_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True) or 1
