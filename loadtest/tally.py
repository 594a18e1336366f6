"""What a stage came to: the figures of the requests and tokens that count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from loadtest.figures import rounded, spread
from loadtest.monitor import BUSY_SHARE, LAG_LIMIT_MS, Monitor
from loadtest.record import Record
from loadtest.server_side import STAGE_ORDER, stages_ms
from loadtest.settings import Metrics
from loadtest.stages import Stage, Window
from loadtest.tail import tail


def tally(
    stage: Stage,
    window: Window,
    records: Sequence[Record],
    monitor: Monitor,
    slo_ms: Mapping[str, float],
    *,
    is_stream: bool,
    collect: Metrics,
) -> dict[str, Any]:
    """Latencies of the requests that were due in the part that counts; tokens and requests that came in it."""
    due = [record for record in records if window.counts(record.scheduled_ns)]
    good = [record for record in due if record.is_good]
    seconds = window.counted_seconds
    completed = sum(record.is_good and window.counts(record.end_ns) for record in records)
    failed = Counter(record.fault.kind for record in due if record.fault is not None)
    return {
        "concurrency": stage.concurrency,
        "rate": stage.rate or None,
        "counted_seconds": rounded(seconds),
        "tps": rounded(sum(tokens_in(window.counted_ns, window.end_ns, records)) / seconds)
        if collect.collect_tps
        else None,
        "rps": rounded(completed / seconds),
        "requests": len(due),
        "ttft_ms": spread(record.ttft_ms for record in good if is_stream and collect.collect_ttft),
        "ttft_from_sent_ms": spread(record.ttft_from_sent_ms for record in good if is_stream and collect.collect_ttft),
        "tpot_ms": spread(record.tpot_ms for record in good if is_stream and collect.collect_tpot),
        "gap_ms": spread(gaps_ms(good)),
        "e2e_ms": spread(record.e2e_ms for record in good),
        "e2e_from_sent_ms": spread(record.e2e_from_sent_ms for record in good),
        "errors": failed.total(),
        "errors_by_kind": dict(failed),
        "retries": sum(record.retries for record in due),
        "retried_requests": sum(record.retries > 0 for record in due),
        "oddities": dict(Counter(oddity for record in good for oddity in record.oddities)),
        "prompt_tokens": spread(record.prompt_tokens for record in good),
        "output_tokens": spread(record.output_tokens for record in good),
        "goodput": goodput(due, slo_ms, seconds),
        "tail": tail(good, records, window.counted_ns, window.end_ns),
        "server_stages_ms": server_stages(good),
        "engine": engine_figures(monitor, window),
        "client": client_figures(monitor, window, due),
    }


def within(window: Window, start_ns: int) -> dict[str, int]:
    """Where the part that counts lies, in microseconds since the start of the run."""
    return {
        "counted_from_us": (window.counted_ns - start_ns) // 1000,
        "counted_to_us": (window.end_ns - start_ns) // 1000,
    }


def tokens_in(from_ns: int, to_ns: int, records: Iterable[Record]) -> Iterator[float]:
    """Tokens of each event in an interval: a request's tokens are shared out evenly over its events."""
    for record in records:
        # Sorted by time: what ended before or began after needs no look.
        events = record.token_events
        if events and events[-1] >= from_ns and events[0] < to_ns:
            weight = record.output_tokens / len(events) if record.is_good else 1.0
            yield weight * sum(from_ns <= at < to_ns for at in events)


def gaps_ms(records: Iterable[Record]) -> Iterator[float]:
    """Times between one event with tokens and the next."""
    for record in records:
        events = record.token_events
        for before, after in pairwise(events):
            yield (after - before) / 1e6


def goodput(due: Sequence[Record], slo_ms: Mapping[str, float], seconds: float) -> dict[str, Any] | None:
    """Requests that met every objective. A failed one met none; one without a TPOT (a single token) can't miss it."""
    if not slo_ms:
        return None
    met = sum(record.is_good and _meets(record, slo_ms) for record in due)
    return {"slo_ms": dict(slo_ms), "rps": rounded(met / seconds), "share": rounded(met / len(due)) if due else None}


def _meets(record: Record, slo_ms: Mapping[str, float]) -> bool:
    times = {"ttft": record.ttft_ms, "tpot": record.tpot_ms, "e2e": record.e2e_ms}
    if times["ttft"] is None and "ttft" in slo_ms:
        return False
    return all((took := times[name]) is None or took <= limit for name, limit in slo_ms.items())


def server_stages(records: Sequence[Record]) -> dict[str, Any] | None:
    """Where the time went by the server's own account, stage by stage in the order of time; None: it gave none."""
    told = [stages_ms(record) for record in records]
    seen = {name for one in told for name in one}
    return {name: spread(one.get(name) for one in told) for name in STAGE_ORDER if name in seen} or None


def engine_figures(monitor: Monitor, window: Window) -> dict[str, Any] | None:
    """Means of what the engine's page said in the part that counts."""
    inside = [sample for sample in monitor.samples if window.counts(sample["at_ns"])]
    own = {"at_ns", "in_flight", "waiting_to_send", "token_events", "client_cpu"}
    names = sorted({name for sample in inside for name in sample} - own)
    if not names:
        return None
    values = {name: [sample[name] for sample in inside if name in sample] for name in names}
    return {name: rounded(sum(found) / len(found)) for name, found in values.items()}


def client_figures(monitor: Monitor, window: Window, due: Sequence[Record]) -> dict[str, Any]:
    """How much of all this may be the client's own doing."""
    lag = spread(monitor.lag_ms(window.counted_ns, window.end_ns))
    cpu = monitor.cpu_share(window.counted_ns, window.end_ns)
    late = spread((record.sent_ns - record.scheduled_ns) / 1e6 for record in due if record.sent_ns)
    lag_p50 = lag["p50"] or 0.0
    return {
        "cpu_share": None if cpu is None else rounded(cpu),
        "loop_lag_ms": {name: lag[name] for name in ("p50", "p99", "max")},
        "sent_late_ms": {name: late[name] for name in ("p50", "p99", "max")},
        "was_bottleneck": (cpu or 0.0) >= BUSY_SHARE or lag_p50 >= LAG_LIMIT_MS,
    }
