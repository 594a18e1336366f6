"""Spans of the engine: made after a request's end from its record, placed on the calendar by one wall-clock reading.

`llm_request` is a child of the caller's span; tokenize, queue, prefill, decode and detokenize are siblings below it,
and a stage that was never reached has no span. Nothing of a prompt's or an answer's text is in them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import msgspec
import requests
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.trace.propagation import set_span_in_context

from backend_engine.record import OK, RequestRecord, timings_of
from protocol.timings import HostIdentity
from tracing import semconv

MAX_QUEUED_SPANS = 16_384
"""Beyond them the oldest are lost; a request never waits for its spans."""
FLUSH_MS = 200
EXPORT_TIMEOUT_SECONDS = 2.0
SHUTDOWN_SECONDS = 2.0
_OWN_HEADERS = frozenset(
    ("accept", "accept-encoding", "connection", "content-encoding", "content-length", "content-type", "user-agent")
)
_LOGGERS = ("opentelemetry.exporter.otlp.proto.http.trace_exporter", "opentelemetry.sdk._shared_internal")

Value = str | int | float | bool | tuple[str, ...]
Attributes = dict[str, Value]
Interval = tuple[str, int | None, int | None, Attributes]
"""Name, start and end (monotonic ns), attributes."""


class OncePerMinute(logging.Filter):
    """Lets one line a minute through, so that a receiver that is away does not fill the log."""

    def __init__(self, seconds: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._seconds = seconds
        self._quiet_until = float("-inf")

    def filter(self, record: logging.LogRecord) -> bool:
        """False while the last line is less than a minute old."""
        now = self._seconds()
        if now < self._quiet_until:
            return False
        self._quiet_until = now + 60
        return True


def otlp_exporter(endpoint: str, token: str | None = None) -> SpanExporter:
    """OTLP over HTTP, protobuf, to the co-located observer, with the token that it asks for.

    The endpoint is given here and other headers are taken off again: OTEL_EXPORTER_OTLP_* describe the backend that the
    observer exports to, credentials included. Proxies of the environment are not for a neighbour on this machine.
    """
    quiet = OncePerMinute()
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(quiet)
    session = requests.Session()
    session.trust_env = False
    session.auth = lambda request: _with_own_headers(request, token)
    return OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_SECONDS, session=session)


def _with_own_headers(request: requests.PreparedRequest, token: str | None) -> requests.PreparedRequest:
    for name in [name for name in request.headers if name.lower() not in _OWN_HEADERS]:
        del request.headers[name]
    if token is not None:
        request.headers["authorization"] = f"Bearer {token}"
    return request


class SpanWriter:
    """Writes the spans of requests that came with a trace context."""

    def __init__(self, exporter: SpanExporter, host: HostIdentity, model: str) -> None:
        resource = Resource({"service.name": "tokenline-engine", "host.id": host.host_id, "host.boot_id": host.boot_id})
        self._model = model
        self._host = host
        self._provider = TracerProvider(sampler=ALWAYS_ON, resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(
            BatchSpanProcessor(
                exporter,
                max_queue_size=MAX_QUEUED_SPANS,
                schedule_delay_millis=FLUSH_MS,
                max_export_batch_size=512,
                export_timeout_millis=EXPORT_TIMEOUT_SECONDS * 1e3,
            )
        )
        self._tracer = self._provider.get_tracer("tokenline.engine")

    def write(self, record: RequestRecord) -> None:
        """The spans of a request that has ended. Nothing where no trace context came with it."""
        if record.parent is None or record.ended_ns is None:
            return
        trace_id, span_id, flags = record.parent
        remote = SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=TraceFlags(flags))
        offset = record.received_wall_ns - record.received_ns
        request_span = self._tracer.start_span(
            semconv.SPAN_LLM_REQUEST,
            context=set_span_in_context(NonRecordingSpan(remote)),
            kind=SpanKind.SERVER,
            attributes=_request_attributes(record, self._model) | {semconv.TIMINGS: self._report(record)},
            start_time=record.received_ns + offset,
        )
        for taken_ns in record.finished.preempted_at_ns if record.finished is not None else ():
            request_span.add_event(semconv.EVENT_PREEMPTED, timestamp=taken_ns + offset)
        if record.error is not None and record.outcome != OK:
            request_span.set_status(Status(StatusCode.ERROR, record.error.code))
        below = set_span_in_context(request_span)
        for name, start_ns, end_ns, attributes in stages_of(record):
            if start_ns is not None and end_ns is not None:
                span = self._tracer.start_span(name, context=below, attributes=attributes, start_time=start_ns + offset)
                span.end(end_ns + offset)
        request_span.end(_end_ns(record) + offset)

    def _report(self, record: RequestRecord) -> str:
        """What would have come in band: whoever was not there for it finds it here."""
        report = timings_of(record, self._host, is_simulated=False, is_last=True)
        return msgspec.json.encode(report).decode()

    def flush(self) -> None:
        """Exports what is queued; for tests and benchmarks."""
        self._provider.force_flush()

    def close(self) -> None:
        """Exports what is queued, for at most SHUTDOWN_SECONDS."""
        closing = threading.Thread(target=self._provider.shutdown, name="close-spans", daemon=True)
        closing.start()
        closing.join(SHUTDOWN_SECONDS)


def _end_ns(record: RequestRecord) -> int:
    """The last instant that belongs to the request; after an abort, when slot and pages were given back."""
    freed_ns = record.finished.ended_ns if record.finished is not None else 0
    return max(record.ended_ns or 0, freed_ns)


def stages_of(record: RequestRecord) -> list[Interval]:
    """The stages in the order of time. One whose start or end is None was not reached.

    A request whose client left in the queue, or in prefill, has that stage up to when the abort took effect.
    `detokenize` is the last stretch: the last token sampled to the last byte handed to the transport. Text is made
    between steps, token by token, so its earlier parts lie within `decode`.
    """
    freed_ns = record.finished.ended_ns if record.finished is not None else None
    scheduled = record.scheduled
    prefill_end = scheduled.prefill_end_ns if scheduled else freed_ns
    last_token = _last_token_ns(record)
    has_decode = scheduled is not None and last_token is not None and last_token > scheduled.prefill_end_ns
    tokenized = record.queued_ns
    written = record.last_written_ns if record.outcome == OK else None
    return [
        (semconv.SPAN_TOKENIZE, record.received_ns, tokenized, {}),
        (semconv.SPAN_QUEUE, tokenized, record.scheduled_ns or freed_ns, _state(record)),
        (semconv.SPAN_PREFILL, record.scheduled_ns, prefill_end, _prefill(record)),
        (semconv.SPAN_DECODE, prefill_end if has_decode else None, last_token, _decode(record)),
        (semconv.SPAN_DETOKENIZE, last_token, written, {}),
    ]


def _last_token_ns(record: RequestRecord) -> int | None:
    """Of an aborted request: of its last token made, wasted ones included."""
    if record.outcome != OK and record.finished is not None:
        return record.finished.last_token_ns
    return record.last_token_ns


def _known(attributes: dict[str, Value | None]) -> Attributes:
    return {name: value for name, value in attributes.items() if value is not None}


def _state(record: RequestRecord) -> Attributes:
    if record.scheduled is None:
        return {}
    state = record.scheduled.state
    return {
        semconv.ENGINE_RUNNING: state.running,
        semconv.ENGINE_WAITING: state.waiting,
        semconv.ENGINE_KV_USAGE: state.kv_usage,
        semconv.ENGINE_BATCH: state.batch,
    }


def _prefill(record: RequestRecord) -> Attributes:
    scheduled = record.scheduled
    return _known(
        {
            semconv.PROMPT_TOKENS: record.prompt_tokens,
            semconv.CACHED_TOKENS: scheduled.cached_tokens if scheduled else None,
            semconv.PREFILL_CHUNKS: scheduled.prefill_chunks if scheduled else None,
        }
    )


def _decode(record: RequestRecord) -> Attributes:
    finished = record.finished
    if finished is None:
        return {semconv.OUTPUT_TOKENS: record.output_tokens}
    return _known(
        {
            semconv.OUTPUT_TOKENS: finished.output_tokens,
            semconv.DECODE_STEPS: finished.steps,
            semconv.MEAN_BATCH: finished.batch_sum / finished.steps if finished.steps else None,
            semconv.TOKEN_GAP: finished.gap_ns / 1e9,
        }
    )


def _request_attributes(record: RequestRecord, model: str) -> Attributes:
    finished = record.finished
    prompt_tokens = record.prompt_tokens if record.queued_ns is not None else None
    found: dict[str, Value | None] = {
        semconv.GEN_AI_OPERATION: "chat" if record.surface == "chat" else "text_completion",
        semconv.GEN_AI_PROVIDER: "tokenline",
        semconv.GEN_AI_REQUEST_MODEL: model,
        semconv.GEN_AI_RESPONSE_MODEL: model,
        semconv.GEN_AI_RESPONSE_ID: record.answer_id,
        semconv.GEN_AI_REQUEST_ID: record.answer_id,
        semconv.REQUEST_ID: record.gateway_request_id,
        semconv.GEN_AI_MAX_TOKENS: record.max_tokens,
        semconv.GEN_AI_TEMPERATURE: record.temperature,
        semconv.GEN_AI_TOP_P: record.top_p,
        semconv.GEN_AI_INPUT_TOKENS: prompt_tokens,
        semconv.GEN_AI_OUTPUT_TOKENS: _output_tokens(record),
        semconv.GEN_AI_FINISH_REASONS: _finish_reasons(record),
        semconv.OUTCOME: record.outcome,
    }
    if record.error is not None:
        found[semconv.ERROR_TYPE] = record.error.code
        found[semconv.HTTP_STATUS] = record.error.status
    elif record.left_ns is not None:
        found[semconv.ERROR_TYPE] = record.outcome
    if record.left_ns is not None and finished is not None and finished.reason == "abort":
        found[semconv.ABORT_SECONDS] = (finished.ended_ns - record.left_ns) / 1e9
        found[semconv.WASTED_TOKENS] = finished.wasted_tokens
    return _known(found | _latencies(record)) | _state(record)


def _output_tokens(record: RequestRecord) -> int | None:
    if record.queued_ns is None:
        return None
    if record.outcome != OK and record.finished is not None:
        return record.finished.output_tokens
    return record.output_tokens


def _finish_reasons(record: RequestRecord) -> tuple[str, ...] | None:
    if record.outcome == OK:
        return record.finish_reasons or None
    return ("abort",) if record.left_ns is not None else ("error",)


def _latencies(record: RequestRecord) -> dict[str, Value | None]:
    """As vLLM and SGLang have them, in seconds; absent where an end is unknown."""
    scheduled, last_token = record.scheduled, _last_token_ns(record)

    def seconds(start: int | None, end: int | None) -> float | None:
        return None if start is None or end is None else (end - start) / 1e9

    prefill_end = scheduled.prefill_end_ns if scheduled else None
    return {
        semconv.LATENCY_QUEUE: seconds(record.queued_ns, record.scheduled_ns),
        semconv.LATENCY_PREFILL: seconds(record.scheduled_ns, prefill_end),
        semconv.LATENCY_DECODE: seconds(prefill_end, last_token),
        semconv.LATENCY_INFERENCE: seconds(record.scheduled_ns, last_token),
        semconv.LATENCY_TTFT: seconds(record.received_ns, prefill_end),
        semconv.LATENCY_E2E: seconds(record.received_ns, record.ended_ns),
    }
