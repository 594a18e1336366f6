"""Where the engine listens: a Unix socket for this user alone, or a port."""

from __future__ import annotations

import contextlib
import os
import socket as sockets
import stat
from collections.abc import Iterator
from pathlib import Path

from settings.schema import Settings

SOCKET_PATH_BYTES = 107
"""Longest path that the kernel takes for a Unix socket, less its final NUL."""


class EngineError(Exception):
    """The engine can't start or go on; the message names the cause and the fix."""


@contextlib.contextmanager
def listening(settings: Settings, path: Path | None) -> Iterator[sockets.socket]:
    """The open listener. Raises EngineError that names what is in the way."""
    if path is None:
        with _port(settings.server.host, settings.server.port) as listener:
            yield listener
        return
    with _unix(path) as listener:
        try:
            yield listener
        finally:
            path.unlink(missing_ok=True)


def _port(host: str, port: int) -> sockets.socket:
    family = sockets.AF_INET6 if ":" in host else sockets.AF_INET
    listener = sockets.socket(family, sockets.SOCK_STREAM)
    listener.setsockopt(sockets.SOL_SOCKET, sockets.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise EngineError(
            f"can't listen on {host}:{port}: {error.strerror}. Set server.host and server.port to a free address"
        ) from error
    return listener


def _unix(path: Path) -> sockets.socket:
    size = len(os.fsencode(path))
    if size > SOCKET_PATH_BYTES:
        raise EngineError(
            f"the socket path {path} is {size} bytes long and at most {SOCKET_PATH_BYTES} are possible. "
            "Set TOKENLINE_STATE_DIR to a shorter path"
        )
    if path.exists():
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise EngineError(f"{path} is in the way of the engine's socket and is not a socket. Move it")
        if _answers(path):
            raise EngineError(
                f"another engine listens on {path} already. End it, or set TOKENLINE_STATE_DIR to another folder"
            )
        path.unlink()
    listener = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)
    try:
        listener.bind(str(path))
        path.chmod(0o600)
    except OSError as error:
        listener.close()
        raise EngineError(f"can't listen on {path}: {error.strerror}") from error
    return listener


def _answers(path: Path) -> bool:
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as probe:
        probe.settimeout(1)
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True
