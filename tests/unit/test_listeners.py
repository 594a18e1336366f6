"""The tenant port's listening sockets."""

import asyncio
import socket

import pytest
import uvloop

from gateway.listeners import ACCEPTS_PER_TURN, BACKLOG, open_listeners
from settings.schema import ServerSettings


def close(listeners: list[socket.socket]) -> None:
    for listener in listeners:
        listener.close()


def test_many_new_connections_are_accepted_in_a_few_turns_of_the_loop(free_port: int) -> None:
    made: list[asyncio.BaseTransport] = []

    class Accepted(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            made.append(transport)

    async def turns_for(count: int) -> int:
        loop = asyncio.get_running_loop()
        servers = [
            await loop.create_server(Accepted, sock=listener, backlog=BACKLOG)
            for listener in open_listeners(ServerSettings(port=free_port))
        ]
        clients = [socket.create_connection(("127.0.0.1", free_port)) for _ in range(count)]
        turns = 0
        async with asyncio.timeout(10):
            while len(made) < count:
                await asyncio.sleep(0)
                turns += 1
        for opened in (*servers, *made, *clients):
            opened.close()
        return turns

    assert uvloop.run(turns_for(8 * ACCEPTS_PER_TURN)) <= 20


def test_a_port_in_use_is_an_error_and_leaves_nothing_open(free_port: int) -> None:
    held = open_listeners(ServerSettings(port=free_port))
    with pytest.raises(OSError, match="in use"):
        open_listeners(ServerSettings(port=free_port))
    close(held)
    close(open_listeners(ServerSettings(port=free_port)))


def test_many_workers_may_listen_on_one_port(free_port: int) -> None:
    server = ServerSettings(port=free_port, workers=2)
    for listeners in [open_listeners(server) for _ in range(2)]:
        close(listeners)


def test_a_name_is_listened_on_at_every_address_that_it_has(free_port: int) -> None:
    listeners = open_listeners(ServerSettings(host="localhost", port=free_port))
    families = {listener.family for listener in listeners}
    found = socket.getaddrinfo("localhost", 1, type=socket.SOCK_STREAM)
    assert families == {family for family, *_ in found}
    close(listeners)
