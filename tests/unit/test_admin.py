"""Keys by HTTP: made once, listed without secrets, revoked; a store that fails is a clear answer."""

import sqlite3
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from gateway.admin import keys_router
from gateway.keys.store import KeyStore
from settings import Settings
from settings.schema import PlanSettings
from tracing.clock import FakeClock, SystemClock
from tracing.ledger import Attempt, Ledger, Usage
from tracing.observer import usage as usage_module
from tracing.observer.usage import UsageBook, read_usage


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    app = FastAPI()
    plans = {"free": PlanSettings(requests_per_minute=60)}
    app.include_router(keys_router(lambda: Settings(state_dir=tmp_path, plans=plans)))
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
        ({"alias": "x", "plan": "gone"}, 422),
        ({"alias": "x", "limits": {"requests_per_minute": 0}}, 422),
        ({"alias": "x", "limits": {"requests": 5}}, 422),
        ({"alias": "x", "tags": ["a\nb"]}, 422),
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


def test_a_key_has_a_plan_limits_and_tags_and_is_rotated(client: TestClient) -> None:
    asked = {"alias": "app", "plan": "free", "limits": {"tokens_per_day": 5}, "tags": ["web"]}
    made = client.post("/keys", json=asked).json()
    assert {name: made[name] for name in ("plan", "limits", "tags")} == {
        "plan": "free", "limits": {"tokens_per_day": 5}, "tags": ["web"],
    }  # fmt: skip
    rotated = client.post("/keys/app/rotate", json={"grace_seconds": 60}).json()
    assert rotated["secret"] != made["secret"]
    shown = client.get(f"/keys/{made['id']}")
    assert shown.json()["previous_until_ns"] - shown.json()["rotated_ns"] == 60 * 10**9
    assert rotated["secret"] not in shown.text
    assert client.post("/keys/nobody/rotate", json={}).status_code == client.get("/keys/nobody").status_code == 404
    client.delete("/keys/app")
    assert client.post("/keys/app/rotate", json={}).status_code == 422


def test_a_key_is_changed_where_it_is_asked_for_and_stays_as_it_is_elsewhere(client: TestClient) -> None:
    asked = {"alias": "app", "team": "t", "models": ["m"], "limits": {"tokens_per_day": 5, "requests_per_minute": 6}}
    made = client.post("/keys", json=asked).json()
    changed = client.patch(f"/keys/{made['id']}", json={"plan": "free", "limits": {"requests_per_minute": 60}}).json()
    assert {name: changed[name] for name in ("id", "team", "models", "plan", "limits")} == {
        "id": made["id"], "team": "t", "models": ["m"], "plan": "free",
        "limits": {"tokens_per_day": 5, "requests_per_minute": 60},
    }  # fmt: skip
    nothing = {"plan": None, "team": None, "models": [], "limits": {"tokens_per_day": None}, "alias": "new"}
    changed = client.patch("/keys/app", json=nothing).json()
    assert (changed["plan"], changed["team"], changed["models"]) == (None, None, [])
    assert changed["limits"] == {"requests_per_minute": 60}
    assert client.get("/keys/new").json() == changed
    assert "secret" not in changed


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"alias": "other"}, 409),
        ({"alias": ""}, 422),
        ({"alias": None}, 422),
        ({"plan": "gone"}, 422),
        ({"limits": {"requests_per_minute": 0}}, 422),
        ({"limits": {"requests": 5}}, 422),
        ({"secret": "sk-tl-mine"}, 422),
    ],
)
def test_a_change_that_cannot_be_is_refused_and_changes_nothing(client: TestClient, change: dict, status: int) -> None:
    client.post("/keys", json={"alias": "other"})
    made = client.post("/keys", json={"alias": "app"}).json()
    assert client.patch("/keys/app", json=change | {"team": "red"}).status_code == status
    assert client.get(f"/keys/{made['id']}").json()["team"] is None
    assert client.patch("/keys/nobody", json={}).status_code == 404


def test_plans_are_listed(client: TestClient) -> None:
    assert client.get("/plans").json() == {
        "plans": [{"name": "free", "limits": {"requests_per_minute": 60}}],
        "default_plan": None,
    }


def ledger(alias: str | None, team: str | None, wall_ns: int, **fields: object) -> Ledger:
    return Ledger("req", "t", "s", wall_ns, 1, key_alias=alias, team=team, model="m", **fields)


def test_usage_is_summed_by_key_team_and_model(client: TestClient, tmp_path: Path) -> None:
    clock = SystemClock()
    book, now = UsageBook(tmp_path / "usage.sqlite", clock), clock.wall_ns()
    counted = Usage(input_tokens=10, output_tokens=4, cached_tokens=2, source="usage")
    for alias, team in (("a", "red"), ("a", "red"), ("b", "red"), ("c", None)):
        book.add(ledger(alias, team, now, usage=counted, status=200))
    book.add(ledger("a", "red", now, status=429))
    book.add(ledger("a", "red", now, usage=Usage(output_tokens=3, source="events"), token_events=3, status=200))
    book.add(ledger("a", "red", now, status=429, attempts=[Attempt(1, "up", "m", "s")]))
    book.add(ledger(None, None, now, status=401))
    book.add(ledger("a", "red", now - 10 * 86_400 * 10**9, usage=counted))
    book.flush()
    found = client.get("/usage", params={"window": "1h"}).json()
    assert [(row["key_alias"], row["requests"], row["input_tokens"]) for row in found["usage"]] == [
        ("a", 5, 20), ("b", 1, 10), ("c", 1, 10),
    ]  # fmt: skip
    first = found["usage"][0]
    assert (first["refused"], first["uncounted"], first["output_tokens"], first["cached_tokens"]) == (1, 1, 11, 4)
    teams = client.get("/usage", params={"window": "30d", "by": "team"}).json()["usage"]
    assert [(row["team"], row["requests"]) for row in teams] == [("red", 7), ("", 1)]
    assert client.get("/usage", params={"by": "model"}).json()["usage"][0]["model"] == "m"
    assert client.get("/usage", params={"window": "soon"}).status_code == 422
    assert client.get("/usage", params={"by": "user"}).status_code == 422


def test_usage_waits_while_it_cannot_be_written_and_is_bounded(tmp_path: Path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(usage_module, "MAX_WAITING", 3)
    clock, path = FakeClock(), tmp_path / "there" / "usage.sqlite"
    book = UsageBook(path, clock)
    for number in range(5):
        book.add(ledger(f"k{number}", None, clock.wall_ns()))
    book.flush()
    assert "2 requests was not counted" in caplog.text
    assert "can't be written" in caplog.text
    path.parent.mkdir()
    book.flush()
    assert len(read_usage(path, 0, ("key_alias",))) == 3
    clock.advance_ms(63 * 86_400_000)
    book.add(ledger("later", None, clock.wall_ns()))
    book.flush()
    assert [row["key_alias"] for row in read_usage(path, 0, ("key_alias",))] == ["later"]
