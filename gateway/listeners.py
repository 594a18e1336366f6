"""The listening sockets of the tenant port.

The event loop accepts one connection for each listening socket in a turn. A turn of a busy worker serves every
connection that it has, so with one socket new connections would wait for as many turns as came before them: seconds,
with some hundred. Each socket is there ACCEPTS_PER_TURN times therefore, under descriptors of its own.
"""

from __future__ import annotations

import socket
from typing import Any

from settings.schema import ServerSettings

ACCEPTS_PER_TURN = 16
BACKLOG = 2048


def open_listeners(server: ServerSettings) -> list[socket.socket]:
    """Sockets for every address that server.host has. Many workers share the port: the kernel deals out connections.

    Raises OSError.
    """
    found = socket.getaddrinfo(server.host, server.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    addresses = dict.fromkeys((family, address) for family, _, _, _, address in found)
    listeners: list[socket.socket] = []
    try:
        for family, address in addresses:
            listener = socket.socket(family, socket.SOCK_STREAM)
            listeners.append(listener)
            _bind(listener, address, shared=server.workers > 1)
            listeners += [listener.dup() for _ in range(ACCEPTS_PER_TURN - 1)]
    except OSError:
        for listener in listeners:
            listener.close()
        raise
    return listeners


def _bind(listener: socket.socket, address: Any, *, shared: bool) -> None:
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    if listener.family == socket.AF_INET6:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # IPv4 has a socket of its own
    listener.bind(address)
    listener.listen(BACKLOG)
