"""How a verb fails: one line for people, one exit code for scripts."""

from __future__ import annotations

import enum


class Exit(enum.IntEnum):
    """Exit codes of every verb. 0 is success."""

    FAILURE = 1
    """It was tried and did not work."""
    USAGE = 2
    """Wrong arguments or configuration; nothing was tried."""
    NOT_FOUND = 3
    """What was asked for does not exist."""
    UNREACHABLE = 4
    """The running gateway could not be asked."""


EXIT_CODES = (
    "Exit codes: 0 success, 1 failure, 2 wrong arguments or configuration, 3 not found, 4 the gateway can't be reached."
)


class CliError(Exception):
    """Told on standard error in one line; ends the command."""

    def __init__(self, message: str, code: Exit = Exit.FAILURE) -> None:
        super().__init__(message)
        self.code = code
