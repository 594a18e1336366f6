"""The timeline of every kind of request on every surface, against what upstream and client really saw."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from conformance_rig import Bench, bench
from expectation import Expect, Played
from oracle import check_all

from loadtest.scripted.script import Script
from tracing.ledger import Outcome

SURFACES = ("chat", "completions")


class Case(NamedTuple):
    """A kind of request and what must be known of it."""

    name: str
    script: dict[str, Any]
    expect: Expect
    stream: bool = True
    usage: bool = False
    """The client asks for the counts."""
    bench: dict[str, Any] | None = None
    """Options of the bench."""
    surfaces: tuple[str, ...] = SURFACES


FALLBACK = {"upstreams": ("a", "b")}
DEAD = FALLBACK | {"dead": ("a",)}
CASES = (
    Case("stream", {}, Expect()),
    Case("stream with the counts asked for", {}, Expect(), usage=True),
    Case("whole", {}, Expect(), stream=False),
    Case("one token", {"tokens": 1}, Expect(tokens=1)),
    Case("slow headers", {"headers_ms": 15}, Expect()),
    Case("reasoning", {"reasoning_tokens": 3}, Expect(), surfaces=("chat",)),
    Case("reasoning, whole", {"reasoning_tokens": 3}, Expect(), stream=False, surfaces=("chat",)),
    Case("role-only first event", {"queue_ms": 15}, Expect(), surfaces=("chat",)),
    Case("no role event", {"role_event": False}, Expect(), surfaces=("chat",)),
    Case("no usage", {"usage": "none"}, Expect(counted_by="events", tokens=5)),
    Case("no usage, whole", {"usage": "none"}, Expect(counted_by=None, tokens=None), stream=False),
    Case("usage doubled", {"usage": "twice"}, Expect(), usage=True),
    Case("usage doubled and not asked for", {"usage": "twice"}, Expect()),
    Case("usage in a chunk with choices", {"usage": "with_choices"}, Expect(), usage=True),
    Case("several tokens in one event", {"tokens": 9, "tokens_per_event": 4}, Expect(tokens=9)),
    Case(
        "several tokens in one event, no usage",
        {"tokens": 9, "tokens_per_event": 4, "usage": "none"},
        Expect(counted_by="events", tokens=3),
    ),
    Case("one event cut over reads", {"piece_bytes": 61, "tokens": 3}, Expect(tokens=3)),
    Case("cut inside characters", {"piece_bytes": 97, "text": "multibyte"}, Expect()),
    Case("cut between CR and LF", {"piece_bytes": 40, "line_end": "crlf", "tokens": 3}, Expect(tokens=3)),
    Case("keep-alive comments", {"comments": True}, Expect()),
    Case("no [DONE]", {"done": False}, Expect()),
    Case("engine here", {"timings": "here"}, Expect(told_by="here")),
    Case("engine here, whole", {"timings": "here"}, Expect(told_by="here"), stream=False),
    Case("engine on another host", {"timings": "elsewhere"}, Expect(told_by="elsewhere")),
    Case("engine on another host, whole", {"timings": "elsewhere"}, Expect(told_by="elsewhere"), stream=False),
    Case("llama.cpp's timings", {"timings": "durations"}, Expect(told_by="llama.cpp")),
    Case("llama.cpp's timings, whole", {"timings": "durations"}, Expect(told_by="llama.cpp"), stream=False),
    Case("Server-Timing", {"server_timing": True}, Expect(told_by="header")),
    Case("Server-Timing, whole", {"server_timing": True}, Expect(told_by="header"), stream=False),
    Case("fallback from a dead upstream", {}, Expect(attempts=(("a", "connect"), ("b", "ok"))), bench=DEAD),
    Case(
        "fallback from a dead upstream, whole",
        {},
        Expect(attempts=(("a", "connect"), ("b", "ok"))),
        stream=False,
        bench=DEAD,
    ),
    Case(
        "fallback from a failing upstream to an engine that tells",
        {"end": "status", "only_at": "a", "headers_ms": 10, "timings": "here"},
        Expect(attempts=(("a", "status"), ("b", "ok")), told_by="here"),
        bench=FALLBACK,
    ),
    Case(
        "fallback from an error before the first event",
        {"end": "error_first", "only_at": "a"},
        Expect(attempts=(("a", "other"), ("b", "ok"))),
        bench=FALLBACK,
    ),
    Case(
        "fallback from a connection cut before the headers",
        {"end": "cut_first", "only_at": "a"},
        Expect(attempts=(("a", "first_byte"), ("b", "ok"))),
        bench=FALLBACK,
    ),
    Case(
        "cut in the stream",
        {"end": "cut_mid"},
        Expect(Outcome.UPSTREAM_ERROR, attempts=(("a", "idle"),), counted_by="events", tokens=1),
    ),
    Case(
        "error in the stream",
        {"end": "error_mid"},
        Expect(Outcome.UPSTREAM_ERROR, attempts=(("a", "other"),), counted_by="events", tokens=1),
    ),
    Case(
        "refused",
        {"end": "status", "status": 429},
        Expect(Outcome.RATE_LIMITED, 429, (("a", "status"),), counted_by=None, tokens=None),
    ),
    Case(
        "failed",
        {"end": "status", "status": 503},
        Expect(Outcome.UPSTREAM_ERROR, 503, (("a", "status"),), counted_by=None, tokens=None),
    ),
)  # fmt: skip


def named(cases: tuple[Case, ...]) -> list[Any]:
    return [pytest.param(case, surface, id=f"{surface}: {case.name}") for case in cases for surface in case.surfaces]


@pytest.mark.parametrize(("case", "surface"), named(CASES))
async def test_marks_stages_samples_and_spans_are_true(tmp_path: Path, case: Case, surface: str) -> None:
    async with bench(tmp_path, **(case.bench or {})) as b:
        played = await play(b, case, surface)
        b.end_waits()
        check_all(played, case.expect, {})


async def play(b: Bench, case: Case, surface: str) -> Played:
    """One request to its end."""
    script = Script(id=case.name, **case.script)
    answer = await b.client.ask(script, surface=surface, stream=case.stream, usage=case.usage)
    ledger = await b.ledger_of(answer)
    return Played(b, script, surface, case.stream, answer, ledger, b.stage.attempts(script.id))
