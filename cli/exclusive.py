"""What only one instance can have: its ports and its state folder. Looked at before anything starts."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from cli.errors import CliError, Exit
from settings.schema import Settings


def check_ports(listeners: Iterable[tuple[str, str, int]]) -> None:
    """(setting, host, port) of each listener. Raises CliError that names the port and the setting."""
    for key, host, port in listeners:
        variable = "TOKENLINE_" + key.upper().replace(".", "__")
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
        except socket.gaierror as error:
            host_key = key.replace("port", "host")
            raise CliError(f"{host_key} = {host!r} is not an address of this machine: {error.strerror}") from None
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
                probe.listen(1)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    fault = f"port {port} of {host} is in use by another process"
                    cure = f"end that, or set {key} to a free port ({variable}=...)"
                else:
                    fault, cure = f"{host}:{port} can't be listened on ({error.strerror})", f"change {key}"
                raise CliError(f"{key} = {port}: {fault}; {cure}") from None


@contextmanager
def owned_state_dir(settings: Settings, names: Iterable[str]) -> Iterator[None]:
    """Holds the named locks of the state folder. Raises CliError when another instance holds one."""
    held = []
    try:
        for name in names:
            descriptor = os.open(settings.state_dir / f"{name}.lock", os.O_RDWR | os.O_CREAT, 0o600)
            held.append(descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = os.read(descriptor, 32).decode("ascii", "replace").strip()
                raise CliError(
                    f"another tokenline (process {owner or 'unknown'}) runs with the state folder "
                    f"{settings.state_dir}; end it, or give this one a folder and ports of its own: "
                    "TOKENLINE_STATE_DIR=...",
                    Exit.USAGE,
                ) from None
            os.truncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        # Closing gives the lock back; the file stays, since removing it could take another's lock away.
        for descriptor in held:
            os.close(descriptor)
