"""The state folder: keys, store, sockets. One per instance."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import platformdirs

from settings.errors import SettingsError
from settings.schema import Settings

SOCKET_PATH_BYTES = 103
"""Longest path of a Unix socket that every platform takes (macOS: 104 with its NUL; Linux: 108)."""
SOCKET_NAME_BYTES = 24
"""Room left in the run folder for the name of a socket."""


def state_dir_of(environ: Mapping[str, str]) -> Path:
    """TOKENLINE_STATE_DIR, else the platform's folder for an application's state; absolute."""
    chosen = environ.get("TOKENLINE_STATE_DIR")
    folder = Path(chosen).expanduser() if chosen else platformdirs.user_state_path("tokenline")
    return folder.absolute()


def prepare_state_dir(settings: Settings) -> None:
    """Makes the state folder and its run folder, for this user alone. Raises SettingsError when it can't be."""
    room = SOCKET_PATH_BYTES - SOCKET_NAME_BYTES - 1
    length = len(os.fsencode(settings.run_dir))
    if length > room:
        raise SettingsError(
            f"the folder for Unix sockets, {settings.run_dir}, has a path of {length} bytes; sockets allow {room}. "
            "Set TOKENLINE_STATE_DIR to a shorter path"
        )
    try:
        settings.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        settings.run_dir.mkdir(mode=0o700, exist_ok=True)
        settings.run_dir.chmod(0o700)
    except OSError as error:
        raise SettingsError(
            f"the state folder {settings.state_dir} can't be made or used: {error.strerror}. "
            "Set TOKENLINE_STATE_DIR to a folder of your own"
        ) from None
