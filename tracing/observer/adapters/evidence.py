"""Evidence: an engine's durations that did not come in band, and a row told anew with them."""

from __future__ import annotations

import msgspec

from protocol.timings import Timings
from tracing.observer.rows import Row
from tracing.stages import timeline_of


class Evidence(msgspec.Struct, frozen=True):
    """What was learnt of the engine's part, and from where."""

    timings: Timings
    """Durations alone: no marks of another process's clock are taken from spans or headers."""
    origin: str
    """SPAN or HEADER of tracing.stages."""
    engine_ttft: float | None = None
    """Seconds from received to first token, where the engine says it itself."""


def retold(row: Row, evidence: Evidence) -> Row:
    """The row with its stages told by the evidence."""
    ledger = msgspec.structs.replace(row.ledger, timings=evidence.timings)
    timeline = timeline_of(ledger, row.host, origin=evidence.origin, engine_ttft=evidence.engine_ttft)
    return msgspec.structs.replace(row, ledger=ledger, timeline=timeline)
