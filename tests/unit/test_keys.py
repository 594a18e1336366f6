"""Keys: their form, the store, the headers, and the cache that keeps the store off the hot path."""

import asyncio
import sqlite3
from pathlib import Path

import pytest

from gateway.keys import verify
from gateway.keys.changes import AliasInUse, KeyNotFound
from gateway.keys.credentials import presented_key, unknown_key
from gateway.keys.limits import Limits
from gateway.keys.record import KeyRecord, NewKey
from gateway.keys.secret import digest, is_well_formed, new_secret
from gateway.keys.store import KeyStore
from gateway.keys.verify import KeyVerifier
from protocol.errors import ApiError
from tracing.clock import FakeClock


@pytest.fixture
def store(tmp_path: Path) -> KeyStore:
    return KeyStore(tmp_path / "keys.sqlite")


def test_a_key_carries_a_checksum_that_finds_slips() -> None:
    key = new_secret()
    assert is_well_formed(key)
    assert not is_well_formed(key[:-1])
    assert not is_well_formed(key[:10] + ("A" if key[10] != "A" else "B") + key[11:])


def test_the_file_holds_no_secret_and_is_private(store: KeyStore, tmp_path: Path) -> None:
    secret, record = store.create(NewKey("app", team="search", models=("m",)))
    assert store.find(digest(secret)) == record
    content = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert secret.encode() not in content
    assert (tmp_path / "keys.sqlite").stat().st_mode & 0o777 == 0o600


def test_an_alias_is_free_again_once_its_key_is_revoked(store: KeyStore) -> None:
    store.create(NewKey("app"))
    with pytest.raises(AliasInUse):
        store.create(NewKey("app"))
    revoked = store.revoke("app")
    assert revoked.revoked_ns
    assert store.revoke(revoked.id) == revoked
    store.create(NewKey("app"))
    with pytest.raises(KeyNotFound):
        store.revoke("nobody")


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ([], "missing_key"),
        ([("authorization", "Bearer ")], "missing_key"),
        ([("authorization", "Bearer")], "malformed_authorization"),
        ([("authorization", "sk-tl-abc")], "malformed_authorization"),
        ([("authorization", "Basic dXNlcg==")], "malformed_authorization"),
        ([("authorization", "Bearer sk tl")], "key_has_whitespace"),
        ([("authorization", "Bearer  sk-tl-abc")], "key_has_whitespace"),
        ([("x-api-key", "sk-tl-abc\\n")], "key_has_whitespace"),
        ([("authorization", "Bearer a"), ("x-api-key", "b")], "conflicting_credentials"),
        ([("authorization", "Bearer a"), ("authorization", "Bearer b")], "conflicting_credentials"),
    ],
)
def test_each_slip_with_the_key_has_its_own_401(headers: list[tuple[str, str]], code: str) -> None:
    with pytest.raises(ApiError) as caught:
        presented_key([(n.encode(), v.encode()) for n, v in headers])
    assert (caught.value.status, caught.value.code) == (401, code)


@pytest.mark.parametrize(
    "headers",
    [
        [(b"authorization", b"Bearer k")],
        [(b"authorization", b"bearer k")],
        [(b"x-api-key", b"k")],
        [(b"api-key", b"k")],
        [(b"authorization", b"Bearer k"), (b"x-api-key", b"k")],
        [(b"authorization", b"Bearer k"), (b"x-api-key", b"")],
    ],
)
def test_every_place_for_the_key_is_accepted(headers: list[tuple[bytes, bytes]]) -> None:
    assert presented_key(headers) == "k"


def test_an_error_never_repeats_the_key() -> None:
    for key in ("sk-tl-0123456789", new_secret(), "sk-proj-abcdef"):
        assert key not in unknown_key(key).message


class Table:
    """A store that counts how often it is asked."""

    def __init__(self, *records: KeyRecord) -> None:
        self.records = {record.digest: record for record in records}
        self.asked = 0
        self.down = False

    def find(self, secret_digest: bytes) -> KeyRecord | None:
        self.asked += 1
        if self.down:
            raise OSError("disk I/O error")
        return self.records.get(secret_digest)


def key_record(secret: str, **fields: object) -> KeyRecord:
    return KeyRecord("key_1", "app", digest(secret), 0, **fields)


async def refusal(verifier: KeyVerifier, secret: str) -> str | None:
    """The code that a key is refused with; look-ups that began beside the request have ended."""
    try:
        await verifier.verify(secret)
    except ApiError as error:
        return error.code
    finally:
        await settle()
    return None


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0.01)


async def test_a_verified_key_is_served_from_memory() -> None:
    table = Table(key_record("k"))
    verifier = KeyVerifier(table.find, FakeClock())
    for _ in range(100):
        assert (await verifier.verify("k")).alias == "app"
    assert table.asked == 1


async def test_a_revoked_key_stops_within_five_seconds() -> None:
    clock, table = FakeClock(), Table(key_record("k"))
    verifier = KeyVerifier(table.find, clock)
    await verifier.verify("k")
    table.records[digest("k")] = key_record("k", revoked_ns=1)
    clock.advance_ms(verify.REFRESH_NS / 1e6 + 1)
    await verifier.verify("k")
    await settle()
    with pytest.raises(ApiError) as caught:
        await verifier.verify("k")
    assert caught.value.code == "revoked_key"
    assert verify.STALE_NS < 5e9


async def test_a_store_that_is_down_never_turns_a_good_key_into_401() -> None:
    clock, table = FakeClock(), Table(key_record("k"))
    verifier = KeyVerifier(table.find, clock)
    await verifier.verify("k")
    table.down = True
    clock.advance_ms(60_000)
    assert (await verifier.verify("k")).alias == "app"
    with pytest.raises(ApiError) as caught:
        await verifier.verify("other")
    assert caught.value.status == 503
    clock.advance_ms(verify.OUTAGE_NS / 1e6)
    with pytest.raises(ApiError) as caught:
        await verifier.verify("k")
    assert caught.value.status == 503


async def test_many_strangers_cost_bounded_memory_and_one_look_up_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "MAX_UNKNOWN", 10)
    table = Table()
    verifier = KeyVerifier(table.find, FakeClock())
    for number in range(30):
        with pytest.raises(ApiError) as caught:
            await verifier.verify(f"sk-{number}")
        assert caught.value.code == "unknown_key"
    assert len(verifier._unknown) == 10
    assert table.asked == 30


async def test_an_expired_key_is_told_so_and_the_bootstrap_key_may_have_any_form() -> None:
    clock = FakeClock()
    verifier = KeyVerifier(Table(key_record("k", expires_ns=clock.wall_ns() + 1)).find, clock, bootstrap="hello")
    assert (await verifier.verify("hello")).alias == "bootstrap"
    await verifier.verify("k")
    clock.advance_ms(1)
    with pytest.raises(ApiError) as caught:
        await verifier.verify("k")
    assert caught.value.code == "expired_key"


async def test_a_watched_store_is_not_asked_again_and_a_change_still_stops_a_key_in_time(store: KeyStore) -> None:
    clock = FakeClock()
    asked: list[bytes] = []

    def find(secret_digest: bytes) -> KeyRecord | None:
        asked.append(secret_digest)
        return store.find(secret_digest)

    secret, _ = store.create(NewKey("app"))
    verifier, watch = KeyVerifier(find, clock), store.watch()
    await verifier.verify(secret)
    for _ in range(60):
        clock.advance_ms(1000)
        assert not watch.changed()
        verifier.confirm(clock.mono_ns())
        await verifier.verify(secret)
    assert len(asked) == 1
    store.revoke("app")
    revoked_ns = clock.mono_ns()
    code = None
    while code is None:
        clock.advance_ms(1000)
        if watch.changed():
            verifier.invalidate()
        verifier.confirm(clock.mono_ns())
        code = await refusal(verifier, secret)
    assert code == "revoked_key"
    assert clock.mono_ns() - revoked_ns <= 5e9
    watch.close()


async def test_a_rotated_keys_old_secret_works_for_its_grace_and_then_says_why_not(store: KeyStore) -> None:
    old, _ = store.create(NewKey("app"))
    new, record = store.rotate("app", 60)
    clock = FakeClock(wall=record.rotated_ns)
    verifier = KeyVerifier(store.find, clock)
    assert (await verifier.verify(old)).id == (await verifier.verify(new)).id == record.id
    clock.advance_ms(60_000)
    assert await refusal(verifier, old) == "expired_key"
    assert (await verifier.verify(new)).id == record.id


async def test_while_the_store_is_down_nobody_waits_for_it_and_it_is_asked_once_a_second() -> None:
    clock, table = FakeClock(), Table(key_record("k"))
    verifier = KeyVerifier(table.find, clock)
    await verifier.verify("k")
    table.down = True
    verifier.outage()
    clock.advance_ms(verify.STALE_NS / 1e6 + 1)
    asked = table.asked
    for _ in range(20):
        clock.advance_ms(100)
        assert (await verifier.verify("k")).alias == "app"
        await settle()
    assert 2 <= table.asked - asked <= 3
    table.down, table.records[digest("k")] = False, key_record("k", revoked_ns=1)
    clock.advance_ms(verify.RETRY_NS / 1e6)
    await verifier.verify("k")
    await settle()
    assert await refusal(verifier, "k") == "revoked_key"


async def test_a_key_confirmed_for_long_outlives_an_outage_from_its_last_confirmation_on() -> None:
    clock, table = FakeClock(), Table(key_record("k"))
    verifier = KeyVerifier(table.find, clock)
    await verifier.verify("k")
    clock.advance_ms(2 * verify.OUTAGE_NS / 1e6)
    verifier.confirm(clock.mono_ns())
    table.down = True
    clock.advance_ms(60_000)
    assert (await verifier.verify("k")).alias == "app"
    clock.advance_ms(verify.OUTAGE_NS / 1e6)
    assert await refusal(verifier, "k") == "upstream_unavailable"


FIRST_TABLE = """
CREATE TABLE keys (
  id TEXT PRIMARY KEY, alias TEXT NOT NULL, digest BLOB NOT NULL UNIQUE, created_ns INTEGER NOT NULL, team TEXT,
  models TEXT NOT NULL DEFAULT '[]', expires_ns INTEGER, revoked_ns INTEGER
) STRICT
"""


def test_a_file_of_the_first_version_keeps_its_keys_and_learns_of_limits(tmp_path: Path) -> None:
    secret, path = new_secret(), tmp_path / "keys.sqlite"
    with sqlite3.connect(path) as db:
        db.execute(FIRST_TABLE)
        row = ("key_1", "app", digest(secret), 5, "team", '["m"]', 9, None)
        db.execute("INSERT INTO keys VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
    for _ in range(2):  # the second opening finds it done
        store = KeyStore(path)
    assert store.find(digest(secret)) == KeyRecord(
        "key_1", "app", digest(secret), 5, team="team", models=("m",), expires_ns=9
    )
    _, record = store.create(NewKey("new", limits=Limits(tokens_per_day=5)))
    assert store.show("new") == record


def test_a_file_of_a_later_version_is_left_alone(tmp_path: Path) -> None:
    KeyStore(tmp_path / "keys.sqlite")
    with sqlite3.connect(tmp_path / "keys.sqlite") as db:
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(sqlite3.DatabaseError, match="version 99"):
        KeyStore(tmp_path / "keys.sqlite")


@pytest.mark.parametrize(
    "fields",
    [
        {"alias": " "},
        {"alias": "a\nb"},
        {"tags": ("",)},
        {"tags": ("x",) * 33},
        {"limits": Limits(0)},
        {"team": "a\x1b[2J"},
        {"models": ("m", "")},
        {"models": ("m\n",)},
    ],
)
def test_what_no_key_can_have_is_refused(fields: dict) -> None:
    with pytest.raises(ValueError, match=r"alias|tags|requests_per_minute|team|models"):
        NewKey(**{"alias": "app", **fields})


async def test_strangers_do_not_queue_up_before_a_store_that_is_down() -> None:
    clock, table = FakeClock(), Table(key_record("k"))
    verifier = KeyVerifier(table.find, clock)
    table.down = True
    assert [await refusal(verifier, secret) for secret in ("k", "x", "y")] == ["upstream_unavailable"] * 3
    assert table.asked == 1
    table.down = False
    clock.advance_ms(verify.RETRY_NS / 1e6)
    assert (await verifier.verify("k")).alias == "app"
    assert await refusal(verifier, "x") == "unknown_key"
