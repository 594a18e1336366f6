"""Evidence: an engine's durations that did not come in band, and a row told anew with them."""

from __future__ import annotations

import sys

import msgspec

from protocol.timings import Timings, plausible
from tracing.observer.rows import Row
from tracing.stages import timeline_of


class Evidence(msgspec.Struct, frozen=True):
    """What was learnt of the engine's part, and from where."""

    timings: Timings
    """Durations; marks only where our own engine reports them, and only if they can be true."""
    origin: str
    """SPAN or HEADER of tracing.stages."""
    engine_ttft: float | None = None
    """Seconds from received to first token, where the engine says it itself."""


def retold(row: Row, evidence: Evidence) -> Row:
    """The row with its stages told by the evidence; as it was when the evidence can't be true."""
    sent = row.ledger.attempts[-1].connect_start if row.ledger.attempts else row.ledger.ingress
    timings = plausible(evidence.timings, row.host, sent, sys.maxsize)
    if timings is None:
        return row
    ledger = msgspec.structs.replace(row.ledger, timings=timings)
    timeline = timeline_of(ledger, row.host, origin=evidence.origin, engine_ttft=evidence.engine_ttft)
    return msgspec.structs.replace(row, ledger=ledger, timeline=timeline)
