"""Published figures: one request at a time, and what the gateway then says of it, on its page and in its record."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, NamedTuple

from loadtest.conformance.bounds import Bounds, e2e_bounds, tpot_bounds, ttft_bounds
from loadtest.conformance.finding import Finding, judged
from loadtest.conformance.page import MetricsPage, Reading
from loadtest.conformance.played import Between, Played
from loadtest.conformance.records import Records, record_findings, timed
from loadtest.scripted.witness import Witness

SETTLE_SECONDS = 6.0
"""So long a gateway may take to publish; what comes later is missed."""
POLL_SECONDS = 0.1
TRIES = 3
"""A figure is wrong when it is wrong every time: a busy machine may stamp one late."""


class Kind(NamedTuple):
    """A kind of request whose figures are known to go wrong in some gateways."""

    name: str
    options: dict[str, Any]
    stream: bool = True


KINDS = (
    Kind("stream", {"timings": "here"}),
    Kind("role-only first event, slow first token", {"queue_ms": 60}),
    Kind("reasoning first", {"reasoning_tokens": 3, "tokens": 6, "gap_ms": 15}),
    Kind("several tokens in one event", {"tokens": 12, "tokens_per_event": 4, "gap_ms": 15}),
    Kind("usage doubled", {"usage": "twice", "wants_usage": True}),
    Kind("no usage", {"usage": "none"}),
    Kind("slow headers", {"headers_ms": 40}),
    Kind("whole", {"timings": "here", "gap_ms": 10}, stream=False),
    Kind("error in the stream", {"end": "error_mid"}),
    Kind("client leaves in the stream", {"gap_ms": 60_000}),
)


class Publisher:
    """Plays a kind of request and reads what is published of it. `page` and `records` may be absent."""

    def __init__(self, between: Between, page: MetricsPage | None, records: Records | None) -> None:
        self._between = between
        self._page = page
        self._records = records
        self.names: dict[str, str] = {}
        """Figures that were found on the page, and their names there."""

    async def check(self, kind: Kind, surface: str) -> list[Finding]:
        """The findings of the try that went best."""
        best: list[Finding] = []
        for _ in range(TRIES):
            found = await self._try(kind, surface)
            wrong = sum(finding.result == "fail" for finding in found)
            if not best or wrong < sum(finding.result == "fail" for finding in best):
                best = found
            if not wrong:
                break
        return best

    async def _try(self, kind: Kind, surface: str) -> list[Finding]:
        case = f"{surface}: {kind.name}"
        before = await self._quiet(self._page) if self._page else None
        leaves = kind.name.startswith("client leaves")
        played = await self._between.play(
            surface=surface,
            stream=kind.stream,
            leave=(lambda answer: bool(answer.token_events)) if leaves else None,
            **kind.options,
        )
        witness = played.witness
        if witness is None:
            return [judged(case, "reaches the upstream", False, f"status {played.answer.status}", "an answer")]
        found: list[Finding] = []
        if self._page is not None and before is not None:
            added = await self._settled(self._page, before)
            self.names |= added.names
            found += page_findings(case, added, played, witness)
        if self._records is not None:
            request_id = played.answer.headers.get("x-tokenline-request-id") or played.answer.headers.get(
                "x-request-id"
            )
            if request_id is None:
                found.append(judged(case, "record", False, "no x-request-id in the answer", "an id"))
            else:
                record = await self._records.of(request_id)
                found += record_findings(case, record, played, witness)
        return found

    async def _quiet(self, page: MetricsPage) -> Reading:
        """The page, once the requests before are all counted: nothing was added for a while."""
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + SETTLE_SECONDS
        seen = await page.read()
        while True:
            await asyncio.sleep(2 * POLL_SECONDS)
            again = await page.read()
            if again == seen or loop.time() >= ends_at:
                return again
            seen = again

    async def _settled(self, page: MetricsPage, before: Reading) -> Reading:
        """What was added, once the request's end has been counted, or after SETTLE_SECONDS."""
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + SETTLE_SECONDS
        while True:
            added = (await page.read()).since(before)
            ended = added.counts.get("e2e", added.counts.get("requests", 0))
            if ended >= 1 or loop.time() >= ends_at:
                return added
            await asyncio.sleep(POLL_SECONDS)


def page_findings(case: str, added: Reading, played: Played, witness: Witness) -> Iterator[Finding]:
    """What one request added to the page, against what it must have added."""
    answer, script = played.answer, played.script
    streamed = bool(answer.events)
    tokens = script.tokens if script.usage != "none" else len(witness.token_events)
    failed = script.end != "complete"
    wanted: dict[str, Bounds | None] = {
        "ttft": ttft_bounds(answer, witness) if streamed else None,
        "e2e": e2e_bounds(answer, witness),
    }
    if not failed and not answer.left_ns:
        wanted["tpot"] = tpot_bounds(answer, witness, tokens) if streamed else None
    for figure, bounds in wanted.items():
        if figure not in added.names or (figure == "e2e" and bounds is None):
            continue
        count = added.counts.get(figure, 0)
        if not streamed and figure == "ttft" and added.names[figure].startswith("vllm:"):
            continue  # an engine knows its first token whatever it sends
        want = 1 if bounds is not None else 0
        yield judged(case, f"page: {figure} samples", count == want, f"{count:g}", f"{want}")
        if bounds is not None and count == 1:
            yield timed(case, f"page: {figure}", added.sums[figure] * 1e3, bounds)
    if answer.left_ns or failed or script.usage == "none":
        return
    for figure, want in (("input tokens", script.input_tokens), ("output tokens", script.tokens)):
        if figure in added.names:
            count = added.counts.get(figure, 0)
            yield judged(case, f"page: {figure}", count == want, f"{count:g}", f"{want}")
