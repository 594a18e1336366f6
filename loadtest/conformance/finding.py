"""Findings: what was looked at, what was seen, and whether that is right."""

from __future__ import annotations

from typing import Literal

import msgspec

Result = Literal["pass", "fail", "skip"]


class Finding(msgspec.Struct, frozen=True):
    """One thing that was looked at."""

    case: str
    check: str
    result: Result
    seen: str
    wanted: str
    off_ms: float | None = None
    """How far a published time lies outside its bounds; None for what is no time."""


class Report(msgspec.Struct, frozen=True):
    """All that was found out about one gateway."""

    base_url: str
    model: str
    findings: list[Finding]
    published: dict[str, str]
    """Figure -> the gateway's own name of it; figures that it does not publish are absent."""

    @property
    def failed(self) -> list[Finding]:
        """What is wrong."""
        return [finding for finding in self.findings if finding.result == "fail"]


def judged(case: str, check: str, right: bool, seen: object, wanted: str) -> Finding:
    """A finding that passes when `right`."""
    return Finding(case, check, "pass" if right else "fail", str(seen), wanted)


def skipped(case: str, check: str, why: str) -> Finding:
    """A finding that could not be made."""
    return Finding(case, check, "skip", why, "-")
