"""The baselines' file: written whole and put in place in one step, so that a crash leaves the one before."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec

from tracing.observer.baseline import WINDOW_SECONDS, Baselines, Classes
from tracing.observer.sketch import RELATIVE_ERROR

VERSION = 1
SAVE_SECONDS = 60.0

log = logging.getLogger("tokenline.observer.baseline")


class _Format(msgspec.Struct):
    """What numbers in the file mean; another program's file is not guessed at."""

    version: int = VERSION
    relative_error: float = RELATIVE_ERROR
    window_seconds: int = WINDOW_SECONDS


class _Written(_Format, kw_only=True):
    classes: msgspec.Raw


class _Read(_Format, kw_only=True):
    classes: Classes


class BaselineFile:
    """Loads at start, saves when anything changed. A file that can't be used is moved aside, never deleted."""

    def __init__(self, path: Path, baselines: Baselines) -> None:
        self._path = path
        self._baselines = baselines
        self._saved_changes = 0

    def load(self) -> None:
        """Takes over what an earlier run saved, if there is any."""
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            log.warning("the baselines in %s cannot be read (%s); new ones are begun", self._path, error)
            return
        try:
            found = msgspec.msgpack.decode(data, type=_Format)
            if found != _Format():
                self._move_aside(f"it is of version {found.version}, this program writes {VERSION}")
                return
            self._baselines.restore(msgspec.msgpack.decode(data, type=_Read).classes)
        except msgspec.MsgspecError as error:
            self._move_aside(f"it is damaged: {error}")

    def save(self) -> None:
        """Writes the file if a request was added since the last time. Trouble is logged; the next time tries again."""
        changes = self._baselines.changes
        if changes == self._saved_changes:
            return
        new = self._path.with_name(self._path.name + ".new")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(msgspec.msgpack.encode(_Written(classes=self._baselines.encoded())))
                file.flush()
                os.fsync(file.fileno())
            new.replace(self._path)
        except OSError as error:
            log.warning("the baselines could not be saved to %s: %s", self._path, error)
            return
        self._saved_changes = changes

    def _move_aside(self, why: str) -> None:
        aside = self._path.with_name(self._path.name + ".old")
        log.warning("the baselines in %s cannot be used (%s); moved to %s, new ones are begun", self._path, why, aside)
        try:
            self._path.replace(aside)
        except OSError as error:
            log.warning("%s could not be moved: %s", self._path, error)
