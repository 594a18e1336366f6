"""What a path that leads nowhere is told."""

from __future__ import annotations

import pytest

from gateway.app import wrong_base_url

BASE_URL = "http://127.0.0.1:8080/api"


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/metrics", "on the ops listener (server.ops_port)"),
        ("/console/requests/req_1", "on the ops listener (server.ops_port)"),
        ("/api/chat/completions/chat/completions", "already holds a whole path"),
        ("/openai/v1/models", "not one of this gateway's prefixes"),
        ("/", "There is nothing at /. Set base_url"),
    ],
)
def test_a_path_that_leads_nowhere_is_told_the_likeliest_slip_and_the_base_url(path: str, told: str) -> None:
    error = wrong_base_url(path, BASE_URL)
    assert error.status == 404
    assert told in error.message
    assert f"Set base_url to {BASE_URL}" in error.message
