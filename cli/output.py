"""Standard output and error of every verb."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console


def print_json(value: Any) -> None:
    """One JSON document on a line of its own."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def say(text: str) -> None:
    """A line for people beside the result: on standard error, so that results can be piped."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def say_notes(notes: Iterable[str]) -> None:
    """Things that the user should know, none of which stops anything."""
    for note in notes:
        say(f"note: {note}")


def console() -> Console:
    """Where tables and charts go: colour only on a terminal, no markup read out of data."""
    return Console(markup=False, highlight=False, soft_wrap=False)
