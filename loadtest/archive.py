"""Runs that are kept: one JSON file each, in the state folder, for its owner alone."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from loadtest.record import Record
from loadtest.server_side import server_columns

FORMAT = 1
RUN_ID = re.compile(r"[0-9]{8}-[0-9]{6}-[0-9a-f]{4}\Z")


class NoRun(Exception):
    """There is no such run, or its file can't be read."""


def new_run_id(wall_ns: int) -> str:
    """Sorts by time: 20260102-030405-9f2c."""
    moment = datetime.fromtimestamp(wall_ns / 1e9, UTC)
    return f"{moment:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def save_run(folder: Path, run: dict[str, Any]) -> Path:
    """Writes the run as a whole or not at all."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = folder / f"{run['run']}.json"
    part = file.with_suffix(".part")
    try:
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as out:
            json.dump(run, out, ensure_ascii=False, separators=(",", ":"))
            out.flush()
            os.fsync(out.fileno())
        part.rename(file)
    finally:
        with contextlib.suppress(FileNotFoundError):
            part.unlink()
    return file


def find_run(folder: Path, name: str) -> Path:
    """The file of a run: a path, a run's id or the beginning of one, or `last`. Raises NoRun."""
    if name.endswith(".json") or "/" in name:
        path = Path(name)
        if not path.is_file():
            raise NoRun(f"{name}: there is no such file")
        return path
    runs = sorted(folder.glob("*.json")) if folder.is_dir() else []
    found = runs[-1:] if name == "last" else [file for file in runs if file.stem.startswith(name)]
    if len(found) == 1:
        return found[0]
    if found:
        raise NoRun(f"{name}: {len(found)} runs begin so; the last of them is {found[-1].stem}")
    newest = ", ".join(file.stem for file in runs[-3:]) or "none yet"
    raise NoRun(f"{name}: there is no such run in {folder}; the newest there: {newest}")


def read_run(file: Path) -> dict[str, Any]:
    """A run's file. Raises NoRun where it is not one."""
    try:
        run = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise NoRun(f"{file}: can't be read: {error}") from None
    if not isinstance(run, dict) or run.get("format") != FORMAT or not isinstance(run.get("stages"), list):
        raise NoRun(f"{file}: is not a run of this version (format {FORMAT})")
    return run


def columns(records: Sequence[Record], start_ns: int, stage_of: Any) -> dict[str, list[Any]]:
    """Each request's own times, in columns: microseconds since the start of the run, null where not reached."""

    def since(instant_ns: int) -> int | None:
        return (instant_ns - start_ns) // 1000 if instant_ns else None

    return {
        "stage": [stage_of(record) for record in records],
        "scheduled_us": [since(record.scheduled_ns) for record in records],
        "sent_us": [since(record.sent_ns) for record in records],
        "first_byte_us": [since(record.first_byte_ns) for record in records],
        "first_token_us": [since(record.first_token_ns) for record in records],
        "last_token_us": [since(record.last_token_ns) for record in records],
        "end_us": [since(record.end_ns) for record in records],
        "prompt_tokens": [record.prompt_tokens for record in records],
        "output_tokens": [record.output_tokens for record in records],
        "token_events": [len(record.token_events) for record in records],
        "retries": [record.retries for record in records],
        "group": [record.group for record in records],
        "error": [record.fault.kind if record.fault else None for record in records],
        "request_id": [record.request_id for record in records],
        **dict(server_columns(records)),
    }


def machine() -> dict[str, Any]:
    """Where the client ran."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"system": platform.platform(), "architecture": platform.machine(), "cores": cores, "host": platform.node()}


def versions() -> dict[str, str]:
    """What the client was made of."""
    found = {"python": platform.python_version()}
    for package in ("tokenline", "aiohttp", "uvloop"):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
