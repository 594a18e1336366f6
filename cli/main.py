"""The entry point of the `tokenline` command."""

from __future__ import annotations


def main() -> None:
    """Parses the command line and runs one verb."""
    raise SystemExit("tokenline: no verb exists yet")
