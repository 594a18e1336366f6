"""Standard output and error of every verb."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Any, TextIO, cast

from rich.console import Console

from cli.plain import plain


def echo(text: str) -> None:
    """A line of the result, for people."""
    sys.stdout.write(plain(text) + "\n")
    sys.stdout.flush()


def print_json(value: Any) -> None:
    """One JSON document on a line of its own."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def say(text: str) -> None:
    """A line for people beside the result: on standard error, so that results can be piped."""
    sys.stderr.write(plain(text) + "\n")
    sys.stderr.flush()


def say_notes(notes: Iterable[str]) -> None:
    """Things that the user should know, none of which stops anything."""
    for note in notes:
        say(f"note: {note}")


def console() -> Console:
    """Where tables and charts go: colour only on a terminal, no markup read out of data."""
    return Console(file=cast(TextIO, _Plain(sys.stdout)), markup=False, highlight=False, soft_wrap=False)


class _Plain:
    """Standard output for rich, whose colours pass."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def write(self, text: str) -> int:
        return self._out.write(plain(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._out, name)
