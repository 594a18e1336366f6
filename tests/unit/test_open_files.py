"""A worker takes all the open files that it may have, and says when they are too few."""

from __future__ import annotations

import resource

import pytest

from gateway.open_files import allow_open_files
from settings.schema import ServerSettings


@pytest.mark.parametrize(
    ("hard", "requests", "warns"), [(20_000, 9_900, False), (20_000, 9_901, True), (-1, 10**6, False)]
)
def test_the_limit_is_raised_and_told_where_it_is_too_low(monkeypatch, caplog, hard, requests, warns) -> None:
    limits = [(1024, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.append(pair))
    allow_open_files(ServerSettings(max_concurrent_requests=2 * requests, workers=2))
    assert limits[-1] == (hard, hard)
    assert ("need 20002" in caplog.text) is warns


def test_a_system_that_does_not_grant_its_hard_limit_is_lived_with(monkeypatch, caplog) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 10**6))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    allow_open_files(ServerSettings(max_concurrent_requests=1024))
    assert "256 open files are allowed" in caplog.text
