"""A row: what is kept of every request that ended, whole, with the columns that people search by."""

from __future__ import annotations

import msgspec

from protocol.timings import HostIdentity
from tracing.ledger import Ledger
from tracing.stages import Timeline


class Row(msgspec.Struct, frozen=True):
    """One request that ended: its ledger, the timeline made of it, and whether its spans are kept."""

    ledger: Ledger
    timeline: Timeline
    host: HostIdentity
    """Whose monotonic clock the ledger's marks are."""
    kept: bool

    @property
    def dominant(self) -> str | None:
        """The stage that took the largest part of TTFT (of E2E where there is no TTFT)."""
        stages = self.timeline.stages
        return max(stages, key=stages.__getitem__) if stages else None

    @property
    def slow_ms(self) -> float | None:
        """What slowness is judged by: TTFT, else E2E (whole answers, and streams that never had a first token)."""
        seconds = slowness(self.timeline)
        return None if seconds is None else seconds * 1e3


def slowness(timeline: Timeline) -> float | None:
    """Seconds that a request is called slow by: TTFT, else E2E."""
    return timeline.ttft if timeline.ttft is not None else timeline.e2e


encode_row = msgspec.msgpack.Encoder().encode
decode_row = msgspec.msgpack.Decoder(Row).decode

COLUMNS = (
    "request_id",
    "client_request_id",
    "trace_id",
    "started_ns",
    "model",
    "upstream",
    "surface",
    "key_alias",
    "team",
    "outcome",
    "status",
    "ttft_ms",
    "tpot_ms",
    "e2e_ms",
    "slow_ms",
    "dominant",
    "kept",
    "body",
)


def columns_of(row: Row) -> tuple[object, ...]:
    """Values of COLUMNS."""
    return (*facts_of(row).values(), encode_row(row))


def facts_of(row: Row) -> dict[str, object]:
    """What is searched by: COLUMNS without the body."""
    ledger, timeline = row.ledger, row.timeline
    values = (
        ledger.request_id,
        ledger.client_request_id,
        ledger.trace_id,
        ledger.wall_ns,
        ledger.model,
        ledger.upstream,
        ledger.surface,
        ledger.key_alias,
        ledger.team,
        ledger.outcome.value,
        ledger.status,
        milliseconds(timeline.ttft),
        milliseconds(timeline.tpot),
        milliseconds(timeline.e2e),
        row.slow_ms,
        row.dominant,
        row.kept,
    )
    return dict(zip(COLUMNS, values, strict=False))


def milliseconds(seconds: float | None) -> float | None:
    """Seconds as ms to the nanosecond, None kept."""
    return None if seconds is None else round(seconds * 1e3, 6)
