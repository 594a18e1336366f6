"""Keys by HTTP: made once, listed without secrets, revoked; a store that fails is a clear answer."""

import sqlite3
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from gateway.admin import keys_router
from gateway.keys.store import KeyStore
from settings import Settings


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    app = FastAPI()
    app.include_router(keys_router(Settings(state_dir=tmp_path)))
    return TestClient(app)


def test_a_key_is_made_listed_without_its_secret_and_revoked(client: TestClient) -> None:
    made = client.post("/keys", json={"alias": "app", "models": ["m"], "team": "t"})
    assert made.status_code == 201
    listed = client.get("/keys")
    assert made.json()["secret"] not in listed.text
    assert [(key["alias"], key["models"], key["revoked_ns"]) for key in listed.json()["keys"]] == [("app", ["m"], None)]
    assert client.delete(f"/keys/{made.json()['id']}").json()["revoked_ns"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"alias": "app"}, 409),
        ({"alias": ""}, 422),
        ({"alias": "a\nb"}, 422),
        ({"alias": "x", "expires_ns": 2**63}, 422),
        ({"alias": "x", "unknown": 1}, 422),
    ],
)
def test_a_key_that_cannot_be_is_refused(client: TestClient, body: dict, status: int) -> None:
    client.post("/keys", json={"alias": "app"})
    assert client.post("/keys", json=body).status_code == status


def test_an_unknown_key_is_not_found(client: TestClient) -> None:
    assert client.delete("/keys/nobody").status_code == 404


def test_a_store_that_fails_is_told_as_such(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(KeyStore, "create", full)
    answer = client.post("/keys", json={"alias": "app"})
    assert answer.status_code == 503
    assert "disk is full" in answer.json()["detail"]
