"""Limits on differences, for pipelines: `ttft_p99>+10%`, `tps<-5%`, `tpot_p95>+2ms`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.compare import Difference
from settings.errors import SettingsError

_RULE = re.compile(r"([a-z][a-z0-9_]*)\s*([<>])\s*([+-]?\d+(?:\.\d+)?)\s*(%|ms)\Z")
METRICS = (
    *(f"{name}_{label}" for name in ("ttft", "ttft_from_sent", "tpot", "e2e") for label in ("p50", "p95", "p99")),
    "tps",
    "rps",
)


@dataclass(frozen=True)
class Rule:
    """B may not be so much above (or below) A."""

    text: str
    metric: str
    is_above: bool
    limit: float
    is_share: bool

    def broken_by(self, difference: Difference) -> bool:
        """Whether the difference is beyond the limit, and is not chance: its interval does not hold 0."""
        if difference.metric != self.metric:
            return False
        value = difference.share if self.is_share else difference.change
        if value is None or difference.low is None or difference.high is None:
            return False
        beyond = value > self.limit if self.is_above else value < self.limit
        return beyond and not difference.low <= 0 <= difference.high


def parse_rule(text: str) -> Rule:
    """A rule. Raises SettingsError that shows how one is written."""
    found = _RULE.match(text.strip())
    if not found or found[1] not in METRICS:
        raise SettingsError(
            f"--fail-on {text!r}: write METRIC>+N% or METRIC<-N%, such as ttft_p99>+10%; metrics: {', '.join(METRICS)}"
        )
    if found[4] == "ms" and found[1] in ("tps", "rps"):
        raise SettingsError(f"--fail-on {text!r}: {found[1]} is not a time; write its limit in %")
    limit = float(found[3]) / 100 if found[4] == "%" else float(found[3])
    return Rule(text.strip(), found[1], found[2] == ">", limit, found[4] == "%")


def broken(rules: Sequence[Rule], differences: Sequence[Difference]) -> list[tuple[Rule, Difference]]:
    """Every rule that a difference breaks."""
    return [(rule, found) for rule in rules for found in differences if rule.broken_by(found)]
