"""Findings: what was looked at, how it is, and a code that names the diagnosis; words for it are in `texts`."""

from __future__ import annotations

from typing import Literal

import msgspec

Result = Literal["ok", "warn", "fail", "skip"]
RESULTS: tuple[Result, ...] = ("ok", "warn", "fail", "skip")
Value = str | int | float

CHECKS = (
    "base_url", "key", "credentials", "proxy", "dns", "connect", "tls", "path", "auth", "model", "answer", "stream",
    "buffering", "clock", "gateway",
)  # fmt: skip
"""In the order in which they are made."""


class Finding(msgspec.Struct, frozen=True):
    """One thing that was looked at."""

    check: str
    result: Result
    code: str
    values: dict[str, Value] = {}
    """What fills the places in the words; never a secret."""


class Report(msgspec.Struct, frozen=True):
    """All that was found out about one base_url, key and model."""

    surface: str
    base_url: str
    """As it was given, secrets masked."""
    base_url_from: str
    used_base_url: str
    """What the later checks were made with: repaired where it was wrong; empty where it could not be."""
    key_fingerprint: str
    """Empty: no key."""
    key_from: str
    model: str
    request_id: str
    is_tokenline: bool
    findings: list[Finding]

    @property
    def troubles(self) -> list[Finding]:
        """What should be changed."""
        return [finding for finding in self.findings if finding.result in ("warn", "fail")]


def ok(check: str, code: str, **values: Value) -> Finding:
    """All is as it should be."""
    return Finding(check, "ok", code, values)


def warn(check: str, code: str, **values: Value) -> Finding:
    """It works, here and now, and is likely to give trouble."""
    return Finding(check, "warn", code, values)


def fail(check: str, code: str, **values: Value) -> Finding:
    """It does not work."""
    return Finding(check, "fail", code, values)


def skip(check: str, code: str, **values: Value) -> Finding:
    """It could not be looked at, or there is nothing to look at."""
    return Finding(check, "skip", code, values)
