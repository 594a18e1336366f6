"""Failures and clients that leave: what the client is told, and how soon the upstream is let go."""

from __future__ import annotations

import contextlib
from typing import Any

from loadtest.conformance.client import Answer
from loadtest.conformance.finding import Finding, judged
from loadtest.conformance.played import PATIENCE_SECONDS, Between
from loadtest.conformance.reading import is_end
from loadtest.scripted.script import Script
from loadtest.scripted.witness import Witness

ABORT_LIMIT_MS = 500.0
FOREVER_MS = 60_000.0


async def upstream_errors(between: Between, surface: str) -> list[Finding]:
    """An upstream's failure is told once, in words, and never as a good end."""
    case = f"{surface}: errors"
    found = []
    for status in (500, 503, 429):
        answer = await _failed(between, surface, end="status", status=status)
        right = answer.status >= 400 and len(answer.errors) == 1
        wanted = "a status of 400 or more and an error"
        found.append(judged(case, f"upstream answers {status}", right, _told(answer), wanted))
    for name, end in (
        ("error event before the first token", "error_first"),
        ("connection cut before the headers", "cut_first"),
    ):
        answer = await _failed(between, surface, end=end)
        right = len(answer.errors) == 1 and not answer.text
        found.append(judged(case, name, right, _told(answer), "one error and no text"))
    for name, end in (("error event in the stream", "error_mid"), ("connection cut in the stream", "cut_mid")):
        answer = await _failed(between, surface, end=end)
        one_error = len(answer.errors) == 1 and answer.broken is None
        noticed = one_error or (end == "cut_mid" and answer.broken is not None and not answer.errors)
        right = answer.status == 200 and len(answer.token_events) == 1 and noticed and not _good_end(answer)
        found.append(judged(case, name, right, _told(answer), "the first token, then one error event, no good end"))
    return found


async def _failed(between: Between, surface: str, **script: Any) -> Answer:
    """The answer to a request whose upstream fails, and a good one after it, lest a breaker see failures in a row."""
    answer = (await between.play(surface=surface, **script)).answer
    await between.play(surface=surface, tokens=1)
    return answer


async def leaving(between: Between, surface: str) -> list[Finding]:
    """A client that leaves closes the upstream's connection at once."""
    case = f"{surface}: client leaves"
    found = []
    for name, stream in (("before the first token", True), ("from a whole answer", False)):
        script = between.script(prefill_ms=FOREVER_MS)
        answer = await _leave_early(between, script, surface, stream=stream)
        found.append(await _abort(between, case, name, script, answer))
    script = between.script(gap_ms=FOREVER_MS)
    answer = await between.client.ask(script, surface=surface, leave=lambda a: bool(a.token_events))
    found.append(await _abort(between, case, "in the stream", script, answer))
    return found


async def _leave_early(between: Between, script: Script, surface: str, *, stream: bool) -> Answer:
    async def asked() -> None:
        with contextlib.suppress(TimeoutError):  # one that never asks is found out when the upstream is looked at
            await between.stage.until(script.id, lambda w: w.scheduled_ns > 0, seconds=PATIENCE_SECONDS)

    return await between.client.leave_before_answer(script, asked, surface=surface, stream=stream)


async def _abort(between: Between, case: str, name: str, script: Script, answer: Answer) -> Finding:
    wanted = f"upstream closed within {ABORT_LIMIT_MS:g} ms"
    if not answer.left_ns:
        return judged(
            case, name, False, f"no token within {PATIENCE_SECONDS:g} s: {_told(answer)}", "a token, then the end"
        )
    try:
        witness: Witness = await between.stage.until(script.id, lambda w: w.gone_ns > 0, seconds=PATIENCE_SECONDS)
    except TimeoutError:
        return judged(case, name, False, f"not closed within {PATIENCE_SECONDS:g} s", wanted)
    took_ms = (witness.gone_ns - answer.left_ns) / 1e6
    return judged(case, name, took_ms <= ABORT_LIMIT_MS, f"closed after {took_ms:.1f} ms", wanted)


def _good_end(answer: Answer) -> bool:
    """Whether the client was led to believe that the answer is complete."""
    finished = any(is_end(event.fields) for event in answer.events)
    return finished or (answer.done and not answer.errors)


def _told(answer: Answer) -> str:
    parts = [f"status {answer.status}", f"{len(answer.token_events)} token events", f"{len(answer.errors)} errors"]
    parts += [f"broken ({answer.broken})"] if answer.broken else []
    parts += ["a good end"] if _good_end(answer) else []
    return ", ".join(parts)
