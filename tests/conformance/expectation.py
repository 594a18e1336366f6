"""How a request must end and what must be known of it, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from conformance_rig import Bench

from loadtest.conformance.client import Answer
from loadtest.scripted.script import Script
from loadtest.scripted.witness import Witness
from tracing.ledger import Attempt, Ledger, Outcome
from tracing.observer.rows import Row

GATEWAY = {"auth", "receive", "route", "gateway_queue", "connect", "send"}
ENGINE_HERE = {"transit_out", "engine_tokenize", "engine_queue", "engine_prefill", "engine_emit", "transit_back"}
ENGINE_BY = {
    "nothing": {"upstream_wait"},
    "here": ENGINE_HERE,
    "elsewhere": {"engine_tokenize", "engine_queue", "engine_prefill", "transit"},
    "llama.cpp": {"engine_prefill", "transit"},
    "span": {"engine_queue", "engine_prefill", "transit"},
    "header": {"engine_queue", "engine_prefill", "transit"},
}
"""Who told the engine's part -> the stages that can be known."""
NANOSECOND = 1e-9
HEADER_ROUNDING = 2e-6
"""Server-Timing is written in ms with three decimals."""


@dataclass
class Expect:
    """How the request must end, and what must be known of it."""

    outcome: Outcome = Outcome.OK
    status: int = 200
    attempts: tuple[tuple[str, str], ...] = (("a", "ok"),)
    """(upstream, result) of each, as tokenline_attempts_total counts them."""
    told_by: str = "nothing"
    """A key of ENGINE_BY."""
    counted_by: str | None = "usage"
    """What the tokens are counted by: usage, events, None."""
    tokens: int | None = 5
    """Output tokens as the ledger must have them."""
    reached: str = "end"
    """How far the last attempt got: end, sent (no answer), queue (never tried)."""
    rejected: str | None = None
    anomalies: set[str] = field(default_factory=set)


@dataclass
class Played:
    """What came of a case."""

    bench: Bench
    script: Script
    surface: str
    stream: bool
    answer: Answer
    ledger: Ledger
    witnesses: list[Witness]

    @property
    def row(self) -> Row:
        return self.bench.row_of(self.ledger)

    @property
    def last(self) -> Attempt:
        return self.ledger.attempts[-1]

    @property
    def witness(self) -> Witness:
        """Of the last attempt."""
        return self.witnesses[-1]


def seconds(start_ns: int, end_ns: int) -> float:
    """A duration."""
    return (end_ns - start_ns) / 1e9
