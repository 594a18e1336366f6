"""The gateway's own account of a load test's requests: fetched when the run has ended, and joined by request id."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from loadtest.record import Record
from tracing.stages import STAGES

STAGE_ORDER = (*STAGES, "streaming", "preempted", "client_backpressure", "unaccounted", "client_link")
"""Every stage that a run may hold, in the order of time; `client_link`: see client_link_ms."""
LATE_STAGES = ("engine_decode", "streaming", "closing", "preempted", "client_backpressure")
"""Of those, the ones after the first token: parts of E2E, not of TTFT."""
IDS_AT_ONCE = 500
TRIES = 6
PAUSE_S = 0.5
"""Between two tries: a request is known to the observer some 0.3 s after its end."""

AskServer = Callable[[Sequence[str]], dict[str, Any]]
"""Asks the ops listener for requests by id; raises NotJoined. Blocks."""


class NotJoined(Exception):
    """The gateway's account can't be had; says why and what to do."""


class ServerSide(msgspec.Struct, frozen=True):
    """One request as the gateway saw it. Times in ms; None: not measured."""

    upstream: str
    size: str
    """Prompt-size class."""
    upstream_model: str | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    stages_ms: dict[str, float] = {}
    placement: str | None = None
    prompt_tokens: int | None = None
    computed_tokens: int | None = None
    output_tokens: int | None = None
    mean_batch: float | None = None
    engine_running: int | None = None
    engine_waiting: int | None = None
    client_rtt_ms: float | None = None


COLUMNS = (
    "upstream", "upstream_model", "ttft_ms", "tpot_ms", "e2e_ms", "computed_tokens", "mean_batch", "engine_running",
    "engine_waiting", "client_rtt_ms",
)  # fmt: skip
"""What is kept of each in the archive beside the stages, as `server_NAME`."""
ENGINE_FIELDS = {
    "engine_tokenize": "tokenize_ms", "engine_queue": "queue_ms", "engine_prefill": "prompt_ms",
    "engine_decode": "predicted_ms",
}  # fmt: skip
"""Stages that an engine tells in band, where no gateway was joined."""


async def join_server(records: Sequence[Record], ask: AskServer | None) -> list[str]:
    """Gives each record its server side; what is to be said of it, in words. Asks nobody where no gateway answered."""
    through = {record.gateway_id: record for record in records if record.gateway_id is not None}
    if not through:
        return []
    if ask is None:
        return ["it went through a Tokenline gateway, whose stages were not asked for"]
    left = list(through)
    try:
        for number in range(TRIES):
            if number:
                await asyncio.sleep(PAUSE_S)
            for first in range(0, len(left), IDS_AT_ONCE):
                found = await asyncio.to_thread(ask, left[first : first + IDS_AT_ONCE])
                for request_id, one in found.items():
                    through[request_id].server = msgspec.convert(one, ServerSide)
            left = [request_id for request_id, record in through.items() if record.server is None]
            if not left:
                break
    except NotJoined as error:
        return [f"the gateway's stages are not joined: {error}"]
    except (msgspec.ValidationError, KeyError) as error:
        return [f"the gateway's stages are not joined: its ops listener answered as no version of ours does: {error}"]
    if len(left) == len(through):
        return [
            "the gateway's stages are not joined: its ops listener knows none of these requests. "
            "Is it the same gateway's? --ops-url names another"
        ]
    return (
        [f"the gateway did not know {len(left)} of {len(through)} requests: they have no stages of its"] if left else []
    )


def stages_ms(record: Record) -> dict[str, float]:
    """Where a request's time went: by the gateway's account, else by what the engine told in band."""
    if record.server is None:
        timings = record.timings
        told = {name: getattr(timings, field) for name, field in ENGINE_FIELDS.items()} if timings is not None else {}
        return {name: value for name, value in told.items() if value is not None}
    link = client_link_ms(record)
    return record.server.stages_ms | ({} if link is None else {"client_link": link})


def client_link_ms(record: Record) -> float | None:
    """What lies between client and gateway: TTFT from sending by the client's clock, less TTFT by the gateway's.

    Durations of two clocks are subtracted, never instants. Of a retried request it is not known.
    """
    server, own = record.server, record.ttft_from_sent_ms
    if server is None or server.ttft_ms is None or own is None or record.retries:
        return None
    return own - server.ttft_ms


def server_columns(records: Sequence[Record]) -> Iterator[tuple[str, list[Any]]]:
    """Columns of the archive: every stage that any request had, and the gateway's figures where it was joined."""
    staged = [stages_ms(record) for record in records]
    seen = {name for one in staged for name in one}
    for name in STAGE_ORDER:
        if name in seen or name in ENGINE_FIELDS:
            yield f"{name}_ms", [_kept(one.get(name)) for one in staged]
    if any(record.server is not None for record in records):
        for name in COLUMNS:
            yield f"server_{name}", [getattr(record.server, name) if record.server else None for record in records]


def _kept(ms: float | None) -> float | None:
    return None if ms is None else round(ms, 6)
