"""Charts as places on an axis: bars in percent of its length. What is drawn comes from the request's JSON alone.

Amounts are shown as they stand in the JSON; the only arithmetic here turns them into places.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dashboards.console.axis import Axis, Bar, Chart
from tracing.stages import GATEWAY_STAGES, STAGES

Record = Mapping[str, Any]
"""One request as the admin API gives it."""

_NETWORK = ("transit", "transit_out", "transit_back")
_GATEWAY = (*GATEWAY_STAGES, "relay", "closing", "streaming")
AFTER = ("streaming", "closing")
"""Parts that sum to E2E - TTFT; whatever else is told of that time lies inside them."""
MIN_GAP_PERCENT = 0.05
MIN_EXCESS_SHARE = 0.01


def group_of(stage: str) -> str:
    """Whose time a stage is."""
    if stage in _NETWORK:
        return "network"
    if stage in _GATEWAY:
        return "gateway"
    return "rest" if stage == "unaccounted" else "engine"


def in_time_order(stages: Mapping[str, float]) -> list[tuple[str, float]]:
    """Stages as time runs; names that this version doesn't know come last."""
    order = {name: number for number, name in enumerate(STAGES)}
    return sorted(stages.items(), key=lambda stage: order.get(stage[0], len(order)))


def stages_chart(record: Record) -> Chart:
    """The stages up to TTFT (of a whole answer: to the end), and `unaccounted` where no stage lies."""
    starts = _starts(record)
    pieces: dict[str, list[tuple[float, float]]] = {}
    reached_ms = 0.0
    for name, ms in in_time_order(record.get("stages") or {}):
        if name == "transit" and ms > 0:
            sent_ms, wait_ms = starts.get(name, reached_ms), ms + _inside_transit(record)
            pieces[name] = [(sent_ms, ms / 2), (sent_ms + wait_ms - ms / 2, ms / 2)]
        else:
            pieces[name] = [(starts.get(name, reached_ms), ms)]
        reached_ms = max(reached_ms, *(start + length for start, length in pieces[name]))
    total_ms = record.get("total_ms")
    axis = Axis(0.0, max(total_ms or 0.0, reached_ms))
    bars = [
        axis.bar(name, ms, group_of(name), pieces[name], total_ms)
        for name, ms in in_time_order(record.get("stages") or {})
    ]
    unaccounted_ms = record.get("unaccounted_ms")
    if unaccounted_ms is not None:
        gaps = _gaps(pieces.values(), axis.end_ms) if unaccounted_ms > 0 else []
        wide = [(start, ms) for start, ms in gaps if axis.length(ms) >= MIN_GAP_PERCENT]
        bars.append(axis.bar("unaccounted", unaccounted_ms, "rest", wide, total_ms))
    return Chart(tuple(bars), axis.ticks(), total_ms)


def after_chart(record: Record) -> Chart | None:
    """What came after a stream's first token: the parts that sum, then what lay inside them."""
    after = record.get("after") or {}
    if not after:
        return None
    marks, last = record["marks"], _last_attempt(record)
    starts = {
        "streaming": marks.get("first_token_written"),
        "closing": marks.get("upstream_end", last.get("end")),
        "engine_decode": marks.get("engine_prefill_end"),
    }
    begin_ms = min(
        marks.get("first_token_written", 0.0), *(starts[name] or math.inf for name in starts if name in after)
    )
    end_ms = max([record.get("e2e_ms") or 0.0, *((starts.get(name) or begin_ms) + ms for name, ms in after.items())])
    axis = Axis(begin_ms, end_ms)
    order = sorted(after.items(), key=lambda part: AFTER.index(part[0]) if part[0] in AFTER else len(AFTER))
    bars = []
    for name, ms in order:
        start_ms = starts.get(name)
        bars.append(axis.bar(name, ms, group_of(name), [] if start_ms is None else [(start_ms, ms)], None))
    return Chart(tuple(bars), axis.ticks(), None)


def whole_chart(record: Record) -> Chart | None:
    """A stream from ingress to its end in one line: TTFT, streaming, closing."""
    ttft_ms, e2e_ms, after = record.get("ttft_ms"), record.get("e2e_ms"), record.get("after") or {}
    if ttft_ms is None or not e2e_ms or "streaming" not in after:
        return None
    axis = Axis(0.0, e2e_ms)
    closing_ms = after.get("closing", 0.0)
    bars = (
        axis.bar("ttft", ttft_ms, "engine", [(0.0, ttft_ms)], e2e_ms),
        axis.bar("streaming", after["streaming"], "gateway", [(ttft_ms, after["streaming"])], e2e_ms),
        axis.bar("closing", closing_ms, "network", [(e2e_ms - closing_ms, closing_ms)], e2e_ms),
    )
    return Chart(bars, axis.ticks(), e2e_ms)


def attempts_chart(record: Record) -> Chart:
    """Each attempt from its first mark to its end, on the axis of the whole request."""
    marks = [attempt.get("marks") or {} for attempt in record.get("attempts") or ()]
    end_ms = max([record.get("e2e_ms") or 0.0, *(max(one.values(), default=0.0) for one in marks)])
    axis = Axis(0.0, end_ms)
    bars = []
    for attempt, one in zip(record.get("attempts") or (), marks, strict=True):
        start_ms, stop_ms = min(one.values(), default=0.0), max(one.values(), default=0.0)
        bars.append(
            axis.bar(str(attempt.get("number")), stop_ms - start_ms, "engine", [(start_ms, stop_ms - start_ms)], None)
        )
    return Chart(tuple(bars), axis.ticks(), None)


def shares(record: Record) -> tuple[Bar, ...]:
    """The stages of one line of a list, end to end."""
    stages = in_time_order(record.get("stages") or {})
    axis = Axis(0.0, max(record.get("total_ms") or 0.0, sum(max(ms, 0.0) for _, ms in stages)))
    reached_ms, bars = 0.0, []
    for name, ms in stages:
        bars.append(axis.bar(name, ms, group_of(name), [(reached_ms, ms)], record.get("total_ms")))
        reached_ms += max(ms, 0.0)
    return tuple(bars)


def worth_showing(excess: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """The stages with a part in the verdict's excess that can be seen; the JSON has all."""
    return [one for one in excess if (one.get("share") or 0.0) >= MIN_EXCESS_SHARE] or excess[:1]


def share_bar(excess: Mapping[str, Any]) -> Bar:
    """One stage's part of the verdict's excess, on an axis that stands for all of it."""
    share = excess.get("share") or 0.0
    return Axis(0.0, 1.0).bar(excess["stage"], excess["ms"], group_of(excess["stage"]), [(0.0, share)], None)


def words(bars: Iterable[Bar]) -> str:
    """The bars as text, for those who don't see them."""
    return ", ".join(f"{bar.name} {bar.ms:,.2f} ms" for bar in bars)


def _last_attempt(record: Record) -> Mapping[str, float]:
    attempts = record.get("attempts") or ()
    marks: Mapping[str, float] = attempts[-1].get("marks") or {} if attempts else {}
    return marks


def _starts(record: Record) -> dict[str, float]:
    """Where each stage begins, ms since ingress, as far as a mark says it."""
    marks, last = record["marks"], _last_attempt(record)
    attempts = record.get("attempts") or ()
    sent_ms = last.get("request_sent")
    whole = "engine_decode" in (record.get("stages") or {})
    sampled = marks.get("engine_last_token") if whole else None
    found = {
        "auth": 0.0,
        "receive": marks.get("authenticated"),
        "route": marks.get("body_read"),
        "gateway_queue": marks.get("routed"),
        "failed_attempts": (attempts[0].get("marks") or {}).get("connect_start") if attempts else None,
        "connect": last.get("connect_start"),
        "send": last.get("connected"),
        "transit_out": sent_ms,
        "transit": sent_ms,
        "upstream_wait": sent_ms,
        "engine_tokenize": marks.get("engine_received"),
        "engine_queue": marks.get("engine_queued"),
        "engine_prefill": marks.get("engine_scheduled"),
        "engine_decode": marks.get("engine_prefill_end"),
        "engine_emit": sampled if sampled is not None else marks.get("engine_prefill_end"),
        "transit_back": marks.get("engine_first_written"),
        "relay": marks.get("first_token"),
        "closing": marks.get("upstream_end", last.get("end")),
    }
    if "transit" in (record.get("stages") or {}) and sent_ms is not None:
        found |= _centred(record, sent_ms)
    return {name: ms for name, ms in found.items() if ms is not None}


def _inside_transit(record: Record) -> float:
    stages: Mapping[str, float] = record.get("stages") or {}
    return sum(ms for name, ms in stages.items() if name.startswith("engine_"))


def _centred(record: Record, sent_ms: float) -> dict[str, float]:
    """Stages of another host's clock: only lengths are known, so they stand in the middle of the wait."""
    at_ms = sent_ms + max(record["stages"]["transit"], 0.0) / 2
    found = {}
    for name, ms in in_time_order(record["stages"]):
        if name.startswith("engine_"):
            found[name] = at_ms
            at_ms += ms
    return found


def _gaps(pieces: Iterable[list[tuple[float, float]]], end_ms: float) -> list[tuple[float, float]]:
    """(start, length) of the time from 0 to `end_ms` that no piece covers."""
    found, reached_ms = [], 0.0
    for start, length in sorted(piece for group in pieces for piece in group):
        if start > reached_ms:
            found.append((reached_ms, start - reached_ms))
        reached_ms = max(reached_ms, start + length)
    if end_ms > reached_ms:
        found.append((reached_ms, end_ms - reached_ms))
    return found
