"""The ops listener reads nothing of a stranger's body, and of nobody's without end."""

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from gateway.admin import keys_router
from settings import Settings
from tracing.observer.app import ops_app
from tracing.observer.door import ADMIN, MAX_BODY_BYTES, Door

KEY = {"x-api-key": "admin"}


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    app = ops_app(
        None,  # type: ignore[arg-type]  # no route that asks it is let through
        None,  # type: ignore[arg-type]
        admin_key_hash=hashlib.sha256(b"admin").digest(),
        routers=[keys_router(lambda: Settings(state_dir=tmp_path))],
    )
    return TestClient(app)


@pytest.mark.parametrize("headers", [{}, {"x-api-key": "sk-tl-tenant"}, {"authorization": "Bearer "}])
def test_every_admin_route_is_shut_to_strangers_before_their_body_is_looked_at(
    client: TestClient, headers: dict[str, str]
) -> None:
    opened = TestClient(client.app, headers=KEY).get(f"{ADMIN}/plans")
    assert opened.status_code == 200
    paths = client.app.openapi()["paths"]  # type: ignore[attr-defined]
    routes = [
        (method.upper(), re.sub(r"\{\w+\}", "x", path))
        for path, methods in paths.items()
        if path.startswith(ADMIN)
        for method in methods
    ]
    assert len(routes) > 8
    for method, path in routes:
        answer = client.request(method, path, content=b"{", headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "unauthorized"), path


def test_a_body_that_is_too_large_is_refused_by_its_length_or_as_it_comes(client: TestClient) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(MAX_BODY_BYTES // 65536 + 2):
            yield b" " * 65536

    for content in (b" " * (MAX_BODY_BYTES + 1), endless()):
        answer = client.post(f"{ADMIN}/keys", content=content, headers={**KEY, "content-type": "application/json"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
    assert client.get(f"{ADMIN}/keys", headers=KEY).json() == {"keys": []}


async def test_a_stranger_s_body_is_not_received() -> None:
    async def app(*_: object) -> None:
        raise AssertionError("let in")

    async def receive() -> dict[str, object]:
        raise AssertionError("read")

    sent: list[dict[str, object]] = []

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": f"{ADMIN}/keys", "headers": [(b"content-length", b"9" * 30)]}
    await Door(app, b"")(scope, receive, send)  # type: ignore[arg-type]
    assert sent[0]["status"] == 401
