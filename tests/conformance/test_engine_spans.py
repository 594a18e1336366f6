"""Spans of the engine that come in time, late, without children, beside in-band timings, or never: each told once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conformance_rig import Bench, bench
from expectation import Expect, Played
from oracle import check_all
from test_leaving import left

from loadtest.scripted.script import Script

SURFACES = ("chat", "completions")


async def play(b: Bench, surface: str, stream: bool = True, **script: Any) -> Played:
    asked = Script(id="1", **script)
    answer = await b.client.ask(asked, surface=surface, stream=stream)
    return Played(b, asked, surface, stream, answer, await b.ledger(), b.stage.attempts("1"))


@pytest.mark.parametrize("surface", SURFACES)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize(("spans", "count"), [("children", 4), ("parent", 1)])
async def test_an_exported_span_tells_queue_prefill_and_decode(
    tmp_path: Path, surface: str, stream: bool, spans: str, count: int
) -> None:
    """`parent` is what a stock vLLM sends: children are made from its attributes, and marked derived."""
    async with bench(tmp_path) as b:
        p = await play(b, surface, stream, spans=spans)
        await b.take_all_spans(count)
        check_all(p, Expect(told_by="span"), {})
        # Nothing is told a second time when the wait is over.
        seen = b.samples()
        b.end_waits()
        assert b.samples() == seen


@pytest.mark.parametrize("surface", SURFACES)
async def test_timings_in_band_are_not_observed_again_when_the_span_comes(tmp_path: Path, surface: str) -> None:
    async with bench(tmp_path) as b:
        p = await play(b, surface, timings="here", spans="children")
        await b.take_all_spans(4)
        b.end_waits()
        check_all(p, Expect(told_by="here"), {})


@pytest.mark.parametrize("surface", SURFACES)
async def test_a_span_that_comes_after_the_wait_is_in_the_trace_and_in_no_metric(tmp_path: Path, surface: str) -> None:
    async with bench(tmp_path) as b:
        b.spans_may_come.clear()
        p = await play(b, surface, spans="children")
        b.end_waits()
        seen = b.samples()
        assert not [span for span in b.trace_of(p.ledger) if span.name == "llm_request"]
        b.spans_may_come.set()
        await b.take_all_spans(4)
        b.end_waits()
        assert b.observer.store.flush()
        assert b.samples() == seen
        check_all(p, Expect(), {})


@pytest.mark.parametrize("surface", SURFACES)
async def test_without_timings_and_spans_the_wait_is_one_stage_told_when_the_wait_for_spans_is_over(
    tmp_path: Path, surface: str
) -> None:
    async with bench(tmp_path) as b:
        p = await play(b, surface)
        assert not [name for name in b.samples() if name.startswith("tokenline_stage_duration")]
        b.end_waits()
        check_all(p, Expect(), {})


@pytest.mark.parametrize("surface", SURFACES)
async def test_an_aborted_request_has_the_spans_of_what_it_reached(tmp_path: Path, surface: str) -> None:
    async with bench(tmp_path) as b:
        script = Script(id="1", prefill_ms=60_000, spans="children")
        answer = await b.client.leave_before_answer(
            script, lambda: b.stage.until("1", lambda w: w.scheduled_ns > 0), surface=surface
        )
        ledger = await b.ledger()  # before the join's clock is moved: spans of a request not heard of are dropped
        await b.take_all_spans(2)
        b.end_waits()
        p = Played(b, script, surface, True, answer, ledger, b.stage.attempts("1"))
        names = {span.name: span for span in b.trace_of(p.ledger)}
        assert names["llm_request"].parent_id == p.last.span_id
        assert names["queue"].parent_id == names["llm_request"].span_id
        assert "prefill" not in names
        assert p.ledger.outcome is left().outcome


async def test_a_retried_request_has_its_engine_spans_below_the_attempt_that_was_answered(tmp_path: Path) -> None:
    async with bench(tmp_path, upstreams=("a", "b")) as b:
        p = await play(b, "chat", spans="children", end="status", only_at="a")
        # The failed attempt's engine never scheduled anything: it has a span, and no children.
        await b.take_all_spans(5)
        b.end_waits()
        spans = b.trace_of(p.ledger)
        requests = {span.parent_id: span for span in spans if span.name == "llm_request"}
        assert set(requests) == {attempt.span_id for attempt in p.ledger.attempts}
        below = requests[p.last.span_id]
        assert {s.name for s in spans if s.parent_id == below.span_id} == {"queue", "prefill", "decode"}
