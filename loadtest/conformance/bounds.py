"""Bounds of a gateway's figures, from what the upstream wrote and what the client read.

A gateway cannot have read what was not written, nor can the client have read what the gateway had not handed over.
So whatever a gateway calls TTFT, TPOT or duration lies between two differences of instants that others stamped.
"""

from __future__ import annotations

from typing import NamedTuple

from loadtest.conformance.client import Answer
from loadtest.scripted.witness import Witness

SLACK_NS = 3_000_000
"""A gateway stamps a write after it: the client may have read it by then, and the gateway may not run for a while."""


class Bounds(NamedTuple):
    """A duration in ns, both ends included."""

    low_ns: int
    high_ns: int

    def off_ns(self, value_ns: float) -> float:
        """How far a value lies outside, beyond the slack; 0 inside, negative below."""
        if value_ns < self.low_ns - SLACK_NS:
            return value_ns - self.low_ns
        if value_ns > self.high_ns + SLACK_NS:
            return value_ns - self.high_ns
        return 0

    def __str__(self) -> str:
        return f"{self.low_ns / 1e6:.1f} to {self.high_ns / 1e6:.1f} ms"


def ttft_bounds(answer: Answer, witness: Witness) -> Bounds | None:
    """Of the first token, reasoning included; None where none reached the client."""
    if not answer.token_events or not witness.token_events:
        return None
    return Bounds(witness.token_events[0].last_ns - witness.received_ns, answer.token_events[0].at_ns - answer.sent_ns)


def tpot_bounds(answer: Answer, witness: Witness, tokens: int) -> Bounds | None:
    """Of (last token - first token) / (tokens - 1); the event with the finish reason may count as the last token."""
    if tokens < 2 or not answer.token_events or answer.left_ns:
        return None
    written = witness.token_events
    low = written[-1].last_ns - answer.token_events[0].at_ns
    high = answer.ended_ns - written[0].last_ns
    return Bounds(max(0, low) // (tokens - 1), high // (tokens - 1))


def e2e_bounds(answer: Answer, witness: Witness) -> Bounds | None:
    """Of the whole request; None where the client left."""
    if answer.left_ns or not witness.writes:
        return None
    return Bounds(witness.writes[-1].last_ns - witness.received_ns, answer.ended_ns - answer.sent_ns)
