"""The console's sessions and its slow door, on a clock that the test moves."""

from __future__ import annotations

import base64

import pytest

from dashboards.console.guard import local_path
from dashboards.console.sessions import (
    LIFETIME_SECONDS,
    MAX_ADDRESSES,
    MAX_ENDED,
    SECONDS_PER_TRY,
    TRIES,
    Sessions,
    Throttle,
)
from tracing.clock import FakeClock


def test_a_session_is_valid_until_it_expires() -> None:
    clock = FakeClock()
    sessions = Sessions(clock)
    token = sessions.issue()
    assert sessions.is_valid(token)
    clock.advance_ms(LIFETIME_SECONDS * 1e3 - 1)
    assert sessions.is_valid(token)
    clock.advance_ms(1)
    assert not sessions.is_valid(token)


def test_no_bit_of_a_token_can_be_changed() -> None:
    sessions = Sessions(FakeClock())
    raw = base64.urlsafe_b64decode(sessions.issue() + "==")
    for position in range(len(raw)):
        changed = bytearray(raw)
        changed[position] ^= 1
        assert not sessions.is_valid(base64.urlsafe_b64encode(bytes(changed)).decode())


@pytest.mark.parametrize("token", ["", "x", "é", "AAAA", "=" * 50, "A" * 75, "A" * 10_000, "\x00", "!" * 75, " "])
def test_nonsense_is_no_session(token: str) -> None:
    assert not Sessions(FakeClock()).is_valid(token)


def test_another_process_knows_nothing_of_the_token() -> None:
    assert not Sessions(FakeClock()).is_valid(Sessions(FakeClock()).issue())


def test_a_copy_of_an_ended_sessions_token_is_worth_nothing_and_other_sessions_go_on() -> None:
    sessions = Sessions(FakeClock())
    mine, other = sessions.issue(), sessions.issue()
    sessions.end(mine)
    sessions.end(mine)
    sessions.end("nonsense")
    assert not sessions.is_valid(mine)
    assert sessions.is_valid(other)


def test_ended_sessions_are_bounded_and_none_of_them_comes_back() -> None:
    clock = FakeClock()
    sessions = Sessions(clock)
    tokens = [sessions.issue() for _ in range(MAX_ENDED + 1)]
    for token in tokens:
        sessions.end(token)
    assert len(sessions._ended) <= MAX_ENDED
    assert not any(map(sessions.is_valid, tokens))
    assert sessions.is_valid(sessions.issue())
    kept = sessions.issue()
    sessions.end(kept)
    clock.advance_ms(LIFETIME_SECONDS * 1e3)
    sessions.end(sessions.issue())
    assert len(sessions._ended) == 1


def test_after_some_wrong_keys_an_address_waits_and_others_do_not() -> None:
    clock = FakeClock()
    throttle = Throttle(clock)
    for _ in range(TRIES):
        assert throttle.wait_seconds("192.0.2.1") == 0
        throttle.failed("192.0.2.1")
    assert throttle.wait_seconds("192.0.2.1") == pytest.approx(SECONDS_PER_TRY)
    assert throttle.wait_seconds("192.0.2.2") == 0
    clock.advance_ms(SECONDS_PER_TRY * 1e3)
    assert throttle.wait_seconds("192.0.2.1") == 0
    throttle.failed("192.0.2.1")
    assert throttle.wait_seconds("192.0.2.1") > 0


def test_a_host_does_not_escape_within_its_own_ipv6_network() -> None:
    throttle = Throttle(FakeClock())
    for number in range(TRIES):
        throttle.failed(f"2001:db8::{number:x}")
    assert throttle.wait_seconds("2001:db8::ffff") > 0
    assert throttle.wait_seconds("2001:db8:0:1::1") == 0


def test_addresses_are_bounded() -> None:
    throttle = Throttle(FakeClock())
    for number in range(MAX_ADDRESSES + 50):
        throttle.failed(f"host-{number}")
    assert len(throttle._free_at) == MAX_ADDRESSES


@pytest.mark.parametrize(
    "target",
    ["/console", "/console/requests/req_1", "/console?window=24h", "/console/requests/a%2Fb?lang=zh&format=json"],
)
def test_the_consoles_own_pages_are_gone_on_to(target: str) -> None:
    assert local_path(target) == target


@pytest.mark.parametrize(
    "target",
    [
        "", "https://evil.test/console", "//evil.test/console", "/\\evil.test", "/console\\..\\", "/consolex",
        "/admin/v1/slow", "javascript:alert(1)", "/console/x\r\nset-cookie: a=b", "/console/x\n", "/console/é",
        "/console/ x", "/console/logout", "/console/login?next=/console", "/console/" + "x" * 3_000,
    ],
)  # fmt: skip
def test_nothing_else_is_gone_on_to(target: str) -> None:
    assert local_path(target) == "/console"
