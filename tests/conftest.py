"""What every test may use."""

import os
import socket

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture
def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
