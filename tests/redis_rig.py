"""A redis-server of a test's own: on a free port, in a temporary folder, ended with the test."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from settings.schema import RedisSettings


class RedisServer:
    """A running server. `freeze` and `thaw` stop and continue the process."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, folder: Path) -> None:
        self.process = process
        self.port = port
        self._folder = folder
        self.url = f"redis://127.0.0.1:{port}/0"

    def settings(self, **fields: object) -> RedisSettings:
        return RedisSettings(url=self.url, **fields)

    def client(self) -> redis.Redis:
        return redis.Redis.from_url(self.url)

    def freeze(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def start_again(self) -> None:
        self.process = _start(self.port, self._folder)


@contextmanager
def redis_server(folder: Path) -> Iterator[RedisServer]:
    """Skips the test where there is no redis-server."""
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed (apt-get install redis-server)")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = RedisServer(_start(port, folder), port, folder)
    try:
        yield server
    finally:
        server.thaw() if server.process.poll() is None else None
        server.kill()


def _start(port: int, folder: Path) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)],
        stdout=subprocess.DEVNULL,
    )
    client = redis.Redis(port=port)
    end = time.monotonic() + 10
    while True:
        try:
            client.ping()
            return process
        except redis.ConnectionError:
            assert process.poll() is None, "redis-server ended at once"
            assert time.monotonic() < end, "redis-server does not answer"
            time.sleep(0.02)
