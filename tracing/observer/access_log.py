"""The access log: one JSON line per request that ended, in a file of bounded size with one predecessor."""

from __future__ import annotations

import logging
import threading
from collections import deque
from pathlib import Path

import msgspec

from tracing.observer.rows import Row
from tracing.observer.view import access_line

MAX_BYTES = 50 * 2**20
MAX_LINES = 20_000

log = logging.getLogger("tokenline.observer.access")


class AccessLog:
    """`add` never waits; `flush` writes, from a thread. Lines over the bound are lost and counted."""

    def __init__(self, path: Path, *, max_bytes: int = MAX_BYTES) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._lines: deque[Row] = deque()
        self._writing = threading.Lock()
        self.lost = 0

    def add(self, row: Row) -> None:
        """Queues the request's line."""
        if len(self._lines) >= MAX_LINES:
            self.lost += 1
            return
        self._lines.append(row)

    def flush(self) -> None:
        """Writes the queued lines; when the file is full it becomes `.1`, and the `.1` before it leaves."""
        with self._writing:
            rows = [self._lines.popleft() for _ in range(len(self._lines))]
            if not rows:
                return
            text = b"".join(msgspec.json.encode(access_line(row)) + b"\n" for row in rows)
            try:
                if self._path.exists() and self._path.stat().st_size + len(text) > self._max_bytes:
                    self._path.replace(self._path.with_name(self._path.name + ".1"))
                self._path.touch(mode=0o600)
                with self._path.open("ab") as file:
                    file.write(text)
            except OSError as error:
                self.lost += len(rows)
                log.error("%d lines of %s were lost: %s", len(rows), self._path, error)
