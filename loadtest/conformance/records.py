"""Tokenline's record of a request (its admin API), held against what upstream and client saw."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import aiohttp
import msgspec

from loadtest.conformance.bounds import Bounds, e2e_bounds, tpot_bounds, ttft_bounds
from loadtest.conformance.finding import Finding, judged
from loadtest.conformance.played import Played
from loadtest.scripted.witness import Witness

WAIT_SECONDS = 10.0
UNACCOUNTED_MS = 1.0
UNACCOUNTED_SHARE = 0.02


class OpsAccess(msgspec.Struct, frozen=True):
    """Where the admin API is, and its key."""

    url: str
    key: str


class Records:
    """Asks for records by request id."""

    def __init__(self, ops: OpsAccess, session: aiohttp.ClientSession) -> None:
        self._ops = ops
        self._session = session

    async def of(self, request_id: str) -> dict[str, Any]:
        """The record, once it is there. Raises ConnectionError that says what is wrong."""
        url = f"{self._ops.url.rstrip('/')}/admin/v1/requests/{request_id}"
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                while True:
                    async with self._session.get(url, headers={"authorization": f"Bearer {self._ops.key}"}) as answer:
                        if answer.status == 200:
                            record: dict[str, Any] = (await answer.json())["matches"][0]
                            return record
                        if answer.status != 404:
                            raise ConnectionError(f"{url} answers with status {answer.status}")
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise ConnectionError(f"no record of {request_id} within {WAIT_SECONDS:g} s at {self._ops.url}") from None
        except aiohttp.ClientError as error:
            raise ConnectionError(f"{url} can't be read: {error}") from error


def record_findings(case: str, record: dict[str, Any], played: Played, witness: Witness) -> Iterator[Finding]:
    """Every figure of the record that has bounds or a definition."""
    answer, script = played.answer, played.script
    streamed, complete = bool(answer.events), script.end == "complete"
    tokens = script.tokens if script.usage != "none" else len(witness.token_events)
    for figure, key, bounds in (
        ("TTFT", "ttft_ms", ttft_bounds(answer, witness) if streamed else None),
        ("TPOT", "tpot_ms", tpot_bounds(answer, witness, tokens) if streamed and complete else None),
        ("E2E", "e2e_ms", e2e_bounds(answer, witness)),
    ):
        if bounds is not None:
            yield timed(case, f"record: {figure}", record.get(key), bounds)
        elif key == "ttft_ms" and not streamed:
            yield judged(
                case, "record: TTFT", record.get(key) is None, record.get(key), "none: no first token was streamed"
            )
    yield from _sums(case, record)
    yield from _engine_stages(case, record, witness, streamed=streamed)
    if not answer.left_ns and complete:
        seen = (record.get("tokens") or {}).get("output")
        counted = record.get("tokens_source")
        if script.usage == "none":
            wanted, right = "counted by events, and said so", counted in ("events", None)
        else:
            wanted, right = f"{script.tokens} by usage", seen == script.tokens and counted == "usage"
        yield judged(case, "record: output tokens", right, f"{seen} by {counted}", wanted)


def _sums(case: str, record: dict[str, Any]) -> Iterator[Finding]:
    stages, total = record.get("stages") or {}, record.get("total_ms")
    if total is None:
        return
    rest = record.get("unaccounted_ms")
    if rest is None:
        yield judged(
            case, "record: stages", "transit" in stages, f"{sorted(stages)}", "a residual where no sum is claimed"
        )
        return
    left = total - sum(stages.values()) - rest
    yield judged(case, "record: stages sum up", abs(left) < 0.001, f"{left:.6f} ms are missing", "nothing is missing")
    limit = max(UNACCOUNTED_MS, UNACCOUNTED_SHARE * total)
    yield judged(case, "record: unaccounted", abs(rest) <= limit, f"{rest:.3f} ms", f"at most {limit:.2f} ms")


def _engine_stages(case: str, record: dict[str, Any], witness: Witness, *, streamed: bool) -> Iterator[Finding]:
    stages = record.get("stages") or {}
    exact = {
        "engine_tokenize": (witness.received_ns, witness.queued_ns),
        "engine_queue": (witness.queued_ns, witness.scheduled_ns),
        "engine_prefill": (witness.scheduled_ns, witness.prefill_end_ns),
    }
    if not streamed:
        exact["engine_decode"] = (witness.prefill_end_ns, witness.last_token_ns)
    for name, (start, end) in exact.items():
        if name in stages:
            wanted_ms = (end - start) / 1e6
            off = stages[name] - wanted_ms
            right = abs(off) < 0.01
            finding = judged(case, f"record: {name}", right, f"{stages[name]:.3f} ms", f"{wanted_ms:.3f} ms")
            yield finding if right else msgspec.structs.replace(finding, off_ms=off)


def timed(case: str, check: str, seen_ms: float | None, bounds: Bounds) -> Finding:
    """A published time against its bounds."""
    if seen_ms is None:
        return judged(case, check, False, "none", str(bounds))
    off_ms = bounds.off_ns(seen_ms * 1e6) / 1e6
    finding = judged(case, check, off_ms == 0, f"{seen_ms:.2f} ms", str(bounds))
    return finding if off_ms == 0 else msgspec.structs.replace(finding, off_ms=round(off_ms, 3))
