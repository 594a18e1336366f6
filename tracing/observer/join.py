"""The join: a request that ended and the engine's spans of it meet here, by trace id.

One trace may hold several requests (the client chose the trace id); spans belong to the request whose attempt they
hang below. A request is complete when the engine's span for its last attempt came with stages below it, or without any
and SETTLE_NS have passed, or when the wait is over. It stays known until the wait is over, so that later spans find it.
Everything is bounded, and time is the injected clock's. Spans that belong to no request yet (strays) have half of the
room, so that a flood of them does not drive out what belongs to somebody.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Protocol

from tracing import semconv
from tracing.clock import Clock
from tracing.ledger import Ledger
from tracing.observer.adapters import evidence_of_spans, is_engine_span, retold, tells_all
from tracing.observer.rows import Row
from tracing.spans import Span, weight_of
from tracing.stages import HEADER

MAX_REQUESTS = 20_000
MAX_SPANS_PER_TRACE = 2_000
MAX_DEPTH = 32
MAX_HELD_BYTES = 64 * 2**20
"""About what the spans in memory may take."""
MAX_SPAN_IDS = 400_000
SETTLE_NS = 1_000_000_000


class JoinSink(Protocol):
    """Who is told what the join found out. Calls come on the join's own thread and must not block."""

    def timed(self, row: Row, *, changed: bool) -> None:
        """The stages of a request are known as well as they ever will be; `changed`: better than when it ended."""

    def completed(self, row: Row, spans: list[Span]) -> None:
        """A request and all the engine spans of it that came."""

    def late(self, trace_id: str, spans: list[Span], *, kept: bool, upstream: str) -> None:
        """Spans of a request that was complete already."""

    def overflowed(self, span: Span) -> None:
        """A span was dropped: its trace has MAX_SPANS_PER_TRACE already, or there is no room for more in memory."""

    def orphaned(self, trace_id: str, spans: list[Span]) -> None:
        """Spans that hang below no request in memory, after the wait; their trace may be stored."""


class _Open:
    """A request that ended not long ago."""

    __slots__ = (
        "attempts",
        "deadline_ns",
        "done",
        "engine",
        "kept",
        "row",
        "seen",
        "spans",
        "timed",
        "trace_id",
        "upstream",
    )

    def __init__(self, row: Row, deadline_ns: int) -> None:
        self.row: Row | None = row
        """None once complete: its memory is needed no more."""
        self.trace_id = row.ledger.trace_id
        self.attempts = [attempt.span_id for attempt in row.ledger.attempts]
        self.kept = row.kept
        self.upstream = row.ledger.upstream
        self.deadline_ns = deadline_ns
        self.spans: list[Span] = []
        self.seen: list[str] = []
        """Ids of all spans it ever took; the trace forgets them with the request."""
        self.engine: Span | None = None
        """The engine's account of the last attempt."""
        self.timed = _told_in_band(row)
        self.done = False

    def has_stages(self) -> bool:
        """Whether the engine's span came with its stages right below it, as our own engine's does."""
        engine = self.engine
        return engine is not None and any(
            span.parent_id == engine.span_id and span.name in semconv.ENGINE_CHILDREN for span in self.spans
        )


def _told_in_band(row: Row) -> bool:
    """Nothing that may still come is better than what the engine said in its answer."""
    return row.ledger.timings is not None and row.timeline.origin != HEADER


class _Trace:
    """What is known of one trace: whose attempts are whose, and the spans that nobody has taken yet."""

    __slots__ = ("deadline_ns", "owners", "parents", "spans")

    def __init__(self) -> None:
        self.owners: dict[str, _Open] = {}
        """Attempt's span id -> request."""
        self.parents: dict[str, str | None] = {}
        """Span id -> parent's, of every span that came: what a chain is climbed by, and what tells repeats."""
        self.spans: list[Span] = []
        self.deadline_ns = 0
        """Of a stray; that of a trace with owners is theirs."""

    def add(self, span: Span) -> bool:
        """False for a span that came before: exporters retry."""
        if span.span_id in self.parents:
            return False
        self.parents[span.span_id] = span.parent_id
        self.spans.append(span)
        return True

    def attempt_above(self, span: Span) -> str | None:
        """Id of the attempt that the span hangs below, as far as its ancestors are known."""
        parent, steps = span.parent_id, 0
        while parent is not None and parent not in self.owners:
            parent, steps = self.parents.get(parent), steps + 1
            if steps > MAX_DEPTH:
                return None
        return parent


class Join:
    """`closed` and `spans` as they come, `tick` a few times a second, `finish` at the end."""

    def __init__(self, sink: JoinSink, clock: Clock, *, wait_ms: float, max_requests: int = MAX_REQUESTS) -> None:
        self._sink = sink
        self._clock = clock
        self._wait_ns = round(wait_ms * 1e6)
        self._max_requests = max_requests
        self._traces: dict[str, _Trace] = {}
        """Traces of requests that ended."""
        self._strays: OrderedDict[str, _Trace] = OrderedDict()
        """Traces of which spans came and no request ended yet, perhaps never will; oldest deadline first."""
        self._held_bytes = 0
        self._span_ids = 0
        self._open: deque[_Open] = deque()
        """Oldest first; every request stays until its wait is over, complete or not."""
        self._settling: deque[tuple[int, _Open]] = deque()

    def closed(self, row: Row) -> None:
        """A request ended."""
        ledger = row.ledger
        expects_spans = bool(ledger.attempts and ledger.attempts[-1].request_sent)
        if _told_in_band(row) or not expects_spans:
            self._sink.timed(row, changed=False)
        if not expects_spans:
            self._sink.completed(row, [])
            return
        if len(self._open) >= self._max_requests:
            self._forget(self._open.popleft())
        request = _Open(row, self._clock.mono_ns() + self._wait_ns)
        trace = self._traces.get(ledger.trace_id) or self._strays.pop(ledger.trace_id, None) or _Trace()
        self._traces[ledger.trace_id] = trace
        trace.owners |= dict.fromkeys(request.attempts, request)
        self._open.append(request)
        if trace.spans:
            self._assign(trace)

    def spans(self, spans: Iterable[Span]) -> None:
        """Engine spans came, of any traces, in any order."""
        touched: dict[str, _Trace] = {}
        for span in spans:
            trace = self._traces.get(span.trace_id)
            room = 1.0 if trace is not None else 0.5
            if self._held_bytes > MAX_HELD_BYTES * room or self._span_ids > MAX_SPAN_IDS * room:
                self._sink.overflowed(span)
                continue
            trace = trace or self._stray(span.trace_id)
            if len(trace.parents) >= MAX_SPANS_PER_TRACE:
                self._sink.overflowed(span)
            elif trace.add(span):
                self._held_bytes += weight_of(span)
                self._span_ids += 1
                touched[span.trace_id] = trace
        for trace in touched.values():
            self._assign(trace)

    def tick(self) -> None:
        """Ends the waits that are over."""
        now = self._clock.mono_ns()
        while self._settling and self._settling[0][0] <= now:
            self._complete(self._settling.popleft()[1])
        while self._open and self._open[0].deadline_ns <= now:
            self._forget(self._open.popleft())
        while self._strays and next(iter(self._strays.values())).deadline_ns <= now:
            self._leave(*self._strays.popitem(last=False))

    def finish(self) -> None:
        """Ends every wait: the process is about to end."""
        while self._open:
            self._forget(self._open.popleft())
        while self._strays:
            self._leave(*self._strays.popitem(last=False))

    def waits_for(self, ledger: Ledger) -> bool:
        """Whether engine spans of this request are still waited for."""
        trace = self._traces.get(ledger.trace_id)
        if trace is None or not ledger.attempts:
            return False
        request = trace.owners.get(ledger.attempts[-1].span_id)
        return request is not None and not request.done

    def spans_of(self, trace_id: str) -> list[Span]:
        """Engine spans of the trace that came and are not handed on yet."""
        trace = self._traces.get(trace_id) or self._strays.get(trace_id)
        if trace is None:
            return []
        owned = {id(request): request for request in trace.owners.values()}
        return [*trace.spans, *(span for request in owned.values() for span in request.spans)]

    def _stray(self, trace_id: str) -> _Trace:
        trace = self._strays.get(trace_id)
        if trace is None:
            trace = _Trace()
            self._let_stray(trace_id, trace)
        return trace

    def _let_stray(self, trace_id: str, trace: _Trace) -> None:
        if len(self._strays) >= self._max_requests:
            self._leave(*self._strays.popitem(last=False))
        trace.deadline_ns = self._clock.mono_ns() + self._wait_ns
        self._strays[trace_id] = trace

    def _assign(self, trace: _Trace) -> None:
        """Gives waiting spans to the requests that they belong to, and completes those that have all."""
        waiting, trace.spans = trace.spans, []
        late: dict[int, tuple[_Open, list[Span]]] = {}
        touched: dict[int, _Open] = {}
        for span in waiting:
            attempt = trace.attempt_above(span)
            if attempt is None:
                trace.spans.append(span)
                continue
            request = trace.owners[attempt]
            request.seen.append(span.span_id)
            if request.done:
                late.setdefault(id(request), (request, []))[1].append(span)
                continue
            request.spans.append(span)
            touched[id(request)] = request
            if request.engine is None and attempt == request.attempts[-1] and is_engine_span(span):
                request.engine = span
                self._settling.append((self._clock.mono_ns() + SETTLE_NS, request))
        for request in touched.values():
            if request.has_stages():
                self._complete(request)
            elif request.engine is not None and tells_all(request.engine):
                self._time(request)
        for request, spans in late.values():
            self._release(spans)
            self._sink.late(request.trace_id, spans, kept=request.kept, upstream=request.upstream)

    def _time(self, request: _Open) -> None:
        """Reports the stages, once: as the engine's spans tell them when nothing came in band."""
        row = request.row
        if request.timed or row is None:
            return
        request.timed = True
        evidence = evidence_of_spans(request.engine, request.spans) if request.engine is not None else None
        if evidence is not None:
            row = request.row = retold(row, evidence)
        self._sink.timed(row, changed=evidence is not None)

    def _complete(self, request: _Open) -> None:
        if request.done:
            return
        self._time(request)
        row, spans = request.row, request.spans
        request.done, request.row, request.spans = True, None, []
        self._release(spans)
        if row is not None:
            self._sink.completed(row, spans)

    def _release(self, spans: list[Span]) -> None:
        self._held_bytes -= sum(map(weight_of, spans))

    def _forget(self, request: _Open) -> None:
        """The wait is over, or there is no room: whatever is known now is the truth."""
        self._complete(request)
        trace = self._traces[request.trace_id]
        for attempt in request.attempts:
            if trace.owners.get(attempt) is request:
                del trace.owners[attempt]
        for span_id in request.seen:
            if trace.parents.pop(span_id, "") != "":
                self._span_ids -= 1
        if not trace.owners:
            del self._traces[request.trace_id]
            if trace.spans:  # of another request of this trace, perhaps, that has not ended yet
                self._let_stray(request.trace_id, trace)
            else:
                self._leave(request.trace_id, trace)

    def _leave(self, trace_id: str, trace: _Trace) -> None:
        """Nobody waits for anything of this trace any more."""
        self._span_ids -= len(trace.parents)
        if trace.spans:
            self._release(trace.spans)
            self._sink.orphaned(trace_id, trace.spans)
