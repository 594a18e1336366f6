"""Health rules of a sampling: what percentiles say that means hide."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from loadtest.digits import four_digits

TTFT_GOOD, TTFT_MOST = 3.0, 5.0
"""P99 TTFT over P50: up to the first healthy, up to the second to be watched, beyond it not healthy."""
TPOT_MOST = 10.0
"""P99 TPOT over P50: an order of magnitude is a jump."""
FEWEST = 20
"""Requests below which a P99 says nothing."""

Result = Literal["pass", "watch", "fail", "unknown"]


class Health(msgspec.Struct, frozen=True):
    """One rule, for one group of requests."""

    group: str
    rule: str
    result: Result
    seen: str


def health(stage: dict[str, Any]) -> list[Health]:
    """The rules, for one group's figures."""
    group = stage["group"]
    return [
        _ratio(group, "P99 TTFT at most 3 times P50, fails over 5", stage["ttft_ms"], TTFT_GOOD, TTFT_MOST),
        _ratio(group, "P99 TPOT less than 10 times P50", stage["tpot_ms"], TPOT_MOST, TPOT_MOST),
        _errors(group, stage),
    ]


def _ratio(group: str, rule: str, spread: dict[str, Any], good: float, most: float) -> Health:
    count, p50, p99 = spread["count"], spread["p50"], spread["p99"]
    if not count or not p50:
        return Health(group, rule, "unknown", "no sample")
    seen = f"P50 {four_digits(p50)} ms, P99 {four_digits(p99)} ms: {p99 / p50:.2f} times"
    if count < FEWEST:
        return Health(group, rule, "unknown", f"{seen}, but of {count} requests; {FEWEST} are needed")
    ratio = p99 / p50
    # The jump itself is the failure; the larger of a band's two bounds still belongs to it.
    failed = ratio >= most if good == most else ratio > most
    return Health(group, rule, "fail" if failed else "watch" if ratio > good else "pass", seen)


def _errors(group: str, stage: dict[str, Any]) -> Health:
    errors, requests = stage["errors"], stage["requests"]
    if not requests:
        return Health(group, "every request succeeds", "unknown", "no request")
    return Health(group, "every request succeeds", "fail" if errors else "pass", f"{errors} of {requests} failed")
