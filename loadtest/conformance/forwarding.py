"""What a gateway does to a stream: how long it holds an event back, whether the bytes stay what they were."""

from __future__ import annotations

import statistics

from loadtest.conformance.client import Answer, Arrival
from loadtest.conformance.finding import Finding, judged
from loadtest.conformance.played import Between, Played
from loadtest.scripted.events import text_of
from loadtest.scripted.witness import Witness
from protocol.sse import event_data

GAP_MS = 25.0
TOKENS = 20
PROMPT_SHARE = 0.9
"""So many of the events must be there before the next one was written: a busy machine may be late with some."""
DELAY_LIMIT_MS = 20.0


async def delays(between: Between, surface: str) -> list[Finding]:
    """Events are passed on as they come, none is held back for company."""
    case = f"{surface}: forwarding"
    played = await between.play(surface=surface, tokens=TOKENS, gap_ms=GAP_MS)
    witness = played.witness
    if witness is None or not played.answer.token_events:
        return [judged(case, "a stream arrives", False, _ended(played.answer), f"{TOKENS} token events")]
    found = forwarding_delays_ns(played.answer, witness)
    written = [event.last_ns for event in witness.token_events]
    before_next = sum(delay < then - now for delay, now, then in zip(found, written, written[1:], strict=False))
    share = before_next / (len(written) - 1)
    median_ms = statistics.median(found) / 1e6
    return [
        judged(
            case, "first token's delay", found[0] / 1e6 <= 2 * DELAY_LIMIT_MS, _ms(found[0]),
            f"at most {2 * DELAY_LIMIT_MS:g} ms",
        ),
        judged(
            case, "median delay of an event", median_ms <= DELAY_LIMIT_MS,
            f"{median_ms:.2f} ms (largest {max(found) / 1e6:.2f} ms)", f"at most {DELAY_LIMIT_MS:g} ms",
        ),
        judged(
            case, "spacing kept (no buffering)", share >= PROMPT_SHARE,
            f"{share:.0%} of the events came before the next was written", f"at least {PROMPT_SHARE:.0%}",
        ),
    ]  # fmt: skip


def forwarding_delays_ns(answer: Answer, witness: Witness) -> list[int]:
    """Of each token event that was written, how long until its text was with the client. Matched by the amount of text,
    so that a gateway which cuts events anew is judged alike."""
    found: list[int] = []
    arrivals = iter(answer.token_events)
    had = wanted = 0
    at_ns = 0
    texts = _written_texts(witness)
    for event, text in zip(witness.token_events, texts, strict=True):
        wanted += len(text)
        while had < wanted and (arrival := next(arrivals, None)) is not None:
            had += len(arrival.text) + len(arrival.reasoning)
            at_ns = arrival.at_ns
        if had < wanted:
            break
        found.append(at_ns - event.last_ns)
    return found


def _written_texts(witness: Witness) -> list[str]:
    events = [Arrival(0, event_data(event.data) or b"") for event in witness.token_events]
    return [event.text + event.reasoning for event in events]


async def bytes_intact(between: Between, surface: str) -> list[Finding]:
    """The text is what the upstream wrote, however it was cut and framed."""
    found = []
    for name, script in (
        ("events cut inside characters", {"text": "multibyte", "piece_bytes": 53, "tokens": 10}),
        ("CRLF, cut between CR and LF", {"line_end": "crlf", "piece_bytes": 40, "tokens": 4}),
        ("keep-alive comments", {"comments": True}),
        ("several tokens in one event", {"tokens": 12, "tokens_per_event": 5}),
        ("events of 60 kB", {"padding_bytes": 60_000, "tokens": 5}),
        ("no [DONE]", {"done": False}),
    ):
        played = await between.play(surface=surface, **script)
        found.append(_text_finding(f"{surface}: bytes", name, played))
    whole = await between.play(surface=surface, stream=False, text="multibyte", tokens=10)
    found.append(_text_finding(f"{surface}: bytes", "whole answer", whole))
    if surface != "completions":
        thinking = await between.play(surface=surface, tokens=6, reasoning_tokens=3)
        wanted = text_of(thinking.script, reasoning=True)
        seen = "".join(event.reasoning for event in thinking.answer.events)
        found.append(judged(f"{surface}: bytes", "reasoning", seen == wanted, repr(seen), repr(wanted)))
    return found


def _text_finding(case: str, name: str, played: Played) -> Finding:
    wanted = text_of(played.script)
    answer, witness = played.answer, played.witness
    right = answer.status == 200 and answer.text == wanted and answer.broken is None
    if not right or witness is None:
        return judged(case, name, False, f"{_ended(answer)}, text {answer.text[:60]!r}", repr(wanted[:60]))
    return judged(case, name, True, "text intact" if not _same_bytes(played) else "every byte intact", "text intact")


def _same_bytes(played: Played) -> bool:
    witness = played.witness
    if witness is None:
        return False
    if not played.answer.events:
        return witness.writes[-1].data == played.answer.body
    written = b"".join(event.data for event in witness.writes if event.what != "usage")
    return written == played.answer.body


async def trace_context(between: Between, surface: str) -> list[Finding]:
    """The client's trace goes on to the upstream."""
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    headers = {"traceparent": f"00-{trace_id}-00f067aa0ba902b7-01"}
    played = await between.play(surface=surface, headers=headers, tokens=1)
    seen = played.witness.headers.get("traceparent", "none") if played.witness else "no request"
    parent = seen.split("-")[2] if seen.count("-") == 3 else ""
    case = f"{surface}: trace"
    return [
        judged(case, "the client's trace id reaches the upstream", trace_id in seen, seen, f"00-{trace_id}-..."),
        judged(
            case, "the upstream's parent is a span of the gateway", bool(parent) and parent != "00f067aa0ba902b7", seen,
            "a span id of its own",
        ),
    ]  # fmt: skip


def _ended(answer: Answer) -> str:
    return f"status {answer.status}" + (f", broken ({answer.broken})" if answer.broken else "")


def _ms(ns: float) -> str:
    return f"{ns / 1e6:.2f} ms"
