"""A model is asked for a stream: are its events as clients expect them, and did they come when they were made?"""

from __future__ import annotations

from typing import Any

import msgspec

from loadtest.conformance.client import Arrival
from loadtest.conformance.reading import is_error
from loadtest.doctor.answering import PATHS, failure_of, fields_of
from loadtest.doctor.asking import Asker, Reply
from loadtest.doctor.finding import Finding, fail, ok, skip, warn
from loadtest.doctor.spacing import SHORTER, Spacing, judge, spacing_of
from protocol.timings import Timings

COUNT = "Count from 1 to 60, one number per line, nothing else."
STREAM_TOKENS = 48


async def ask_stream(asker: Asker, base_url: str, model: str, limit_name: str) -> tuple[Reply, list[Finding]]:
    """The stream, and what was found in it and in its rhythm."""
    reply = await _ask(asker, base_url, model, limit_name, STREAM_TOKENS)
    if (failed := failure_of(reply, asker, model, "stream")) is not None and not reply.events:
        return reply, [failed]
    found = _judge_events(reply, asker)
    if any(finding.result == "fail" for finding in found):
        return reply, [*found, skip("buffering", "after", other="stream")]
    spacing = _spacing(reply)
    verdict = judge(spacing, decode_ms(reply), reply.lag_ms)
    if verdict == "ask_shorter":
        shorter = await _ask(asker, base_url, model, limit_name, max(2, spacing.events // SHORTER))
        verdict = judge(spacing, None, reply.lag_ms, shorter=_spacing(shorter))
    return reply, [*found, _buffering(verdict, spacing, reply)]


def decode_ms(reply: Reply) -> float | None:
    """How long the engine decoded, by its own `timings` (Tokenline, llama.cpp); None where it doesn't tell."""
    for event in reversed(reply.events):
        report = event.fields.get("timings")
        if isinstance(report, dict):
            try:
                found = msgspec.convert(report, Timings)
            except msgspec.ValidationError:
                return None
            return found.predicted_ms
    return None


async def _ask(asker: Asker, base_url: str, model: str, limit_name: str, tokens: int) -> Reply:
    url = asker.url_of(base_url, PATHS[asker.surface])
    return await asker.post(url, fields_of(model, COUNT, tokens, stream=True, limit_name=limit_name))


def _spacing(reply: Reply) -> Spacing:
    return spacing_of(reply.sent_ns, [event.at_ns for event in reply.token_events])


def _judge_events(reply: Reply, asker: Asker) -> list[Finding]:
    kind = reply.headers.get("content-type", "").split(";")[0]
    if kind != "text/event-stream":
        return [fail("stream", "stream_not_sse", kind=kind or "-")]
    events = [event for event in reply.events if event.data != b"[DONE]"]
    errors = [event.fields for event in events if is_error(event.fields)]
    if errors:
        return [fail("stream", "stream_error", said=asker.shown(_message(errors[0])))]
    if reply.broken:
        return [fail("stream", "stream_broken", events=len(events), said=reply.said)]
    found = _odd_choices(events) if asker.surface == "openai" else []
    is_empty = asker.surface == "openai" and not any(event.fields.get("choices") for event in events)
    if is_empty or not events:
        return [fail("stream", "stream_choices_empty" if events else "stream_no_events", events=len(events))]
    if encoding := reply.headers.get("content-encoding"):
        found.append(warn("stream", "stream_compressed", encoding=encoding))
    if not reply.token_events:
        found.append(warn("stream", "stream_without_text", events=len(events)))
    if not _is_ended(reply, asker):
        found.append(warn("stream", "stream_no_end", end="[DONE]" if asker.surface == "openai" else "message_stop"))
    if found:
        return found
    first_ms = round((reply.token_events[0].at_ns - reply.sent_ns) / 1e6)
    return [ok("stream", "stream_came", events=len(reply.token_events), ttft_ms=first_ms)]


def _odd_choices(events: list[Arrival]) -> list[Finding]:
    """Events with `choices: []`, on which a client that reads `choices[0]` fails."""
    empty = [number for number, event in enumerate(events) if event.fields.get("choices") == []]
    if not empty or len(empty) == len(events):
        return []
    if empty[0] == 0:
        return [warn("stream", "stream_first_empty")]
    with_usage = events[empty[-1]].fields.get("usage") is not None
    return [warn("stream", "stream_usage_unasked" if with_usage else "stream_some_empty", count=len(empty))]


def _is_ended(reply: Reply, asker: Asker) -> bool:
    if asker.surface == "openai":
        return reply.done
    return any(event.fields.get("type") == "message_stop" for event in reply.events)


def _buffering(verdict: str, spacing: Spacing, reply: Reply) -> Finding:
    values: dict[str, Any] = {
        "events": spacing.events,
        "waited_ms": round(spacing.waited_ms),
        "spread_ms": round(spacing.spread_ms, 1),
        "clumps": spacing.clumps,
    }
    if verdict == "apart":
        return ok("buffering", "events_apart", **values)
    if verdict == "buffered":
        decode = decode_ms(reply)
        server = reply.server or "-"
        if decode is None:
            return fail("buffering", "events_held_back", server=server, **values)
        return fail("buffering", "events_at_once", decode_ms=round(decode), server=server, **values)
    if verdict == "in_pieces":
        return warn("buffering", "events_in_pieces", server=reply.server or "-", **values)
    return skip("buffering", f"spacing_{verdict}", lag_ms=round(reply.lag_ms, 1), **values)


def _message(fields: dict[str, Any]) -> str:
    error = fields.get("error")
    return str(error.get("message") or error) if isinstance(error, dict) else str(error or fields)
