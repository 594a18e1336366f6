"""Asking for requests: what the admin API answers, and what every page is made of."""

from __future__ import annotations

from typing import Any

from fastapi.concurrency import run_in_threadpool

from protocol.ids import parse_traceparent
from tracing.observer.core import Observer
from tracing.observer.rows import Row
from tracing.observer.texts import Language
from tracing.observer.verdict import Judge
from tracing.observer.view import request_view, slow_view, span_view, trace_of
from tracing.observer.windows import window_ns


async def requests_with_id(
    observer: Observer, any_id: str, *, spans: bool, language: Language = "en"
) -> list[dict[str, Any]]:
    """Every request with this request id, client's own id, trace id or traceparent, with its verdict; newest first."""
    parsed = parse_traceparent(any_id.strip())
    rows = await run_in_threadpool(observer.store.find, parsed[0] if parsed else any_id.strip())
    matches = []
    judge = observer.judge()
    for row in reversed(rows):
        complete = not observer.join.waits_for(row.ledger)
        view = request_view(row, complete=complete) | judge.explain(row, language, complete=complete)
        if spans:
            stored = await run_in_threadpool(observer.store.spans_of, row.ledger.trace_id)
            waiting = observer.join.spans_of(row.ledger.trace_id)
            view["spans"] = [span_view(span) for span in trace_of(row, [*stored, *waiting])]
        matches.append(view)
    return matches


async def slowest_requests(
    observer: Observer, window: str, model: str | None, limit: int, **asked: Any
) -> list[dict[str, Any]]:
    """The slowest requests that began in the window; `asked` are the further words of Store.slow. Raises ValueError."""
    since_ns = observer.clock.wall_ns() - window_ns(window)
    rows = await run_in_threadpool(observer.store.slow, since_ns=since_ns, model=model, limit=limit, **asked)
    return await run_in_threadpool(_with_causes, observer.judge(), rows)


async def latest_requests(observer: Observer, limit: int) -> list[dict[str, Any]]:
    """The requests that ended last, newest first."""
    return [slow_view(row) for row in await run_in_threadpool(observer.store.latest, limit)]


def _with_causes(judge: Judge, rows: list[Row]) -> list[dict[str, Any]]:
    """Each row's line, with the cause of its slowness."""
    causes = judge.causes(rows)
    return [
        slow_view(row) | {"cause": cause.value, "confidence": confidence.value}
        for row, (cause, confidence) in zip(rows, causes, strict=True)
    ]
