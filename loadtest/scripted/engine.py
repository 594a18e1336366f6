"""What a scripted engine reports of itself: `timings` in band, the Server-Timing header, spans by OTLP."""

from __future__ import annotations

import secrets
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from loadtest.scripted.script import Script
from loadtest.scripted.witness import Witness
from protocol.ids import parse_traceparent
from tracing import semconv
from tracing.clock import host_identity

ELSEWHERE = {"host_id": "another-host", "boot_id": "another-boot", "time_namespace": ""}
_EPOCH_SHIFT_NS = 3_600_000_000_000_000
"""Another host's monotonic clock: far from ours, so that subtracting the two could not be overlooked."""


def timings_of(script: Script, witness: Witness, *, first_written_ns: int) -> dict[str, Any] | None:
    """The report as far as the engine has got; None where the script reports nothing."""
    if script.timings == "none":
        return None
    found: dict[str, Any] = {
        "prompt_n": script.input_tokens,
        "prompt_ms": _ms(witness.scheduled_ns, witness.prefill_end_ns),
    }
    if witness.last_token_ns:
        found["predicted_n"] = script.tokens
        found["predicted_ms"] = _ms(witness.prefill_end_ns, witness.last_token_ns)
    if script.timings == "durations":
        return found
    found["tokenize_ms"] = _ms(witness.received_ns, witness.queued_ns)
    found["queue_ms"] = _ms(witness.queued_ns, witness.scheduled_ns)
    found["engine"] = {"running": 3, "waiting": 2, "kv_usage": 0.25, "batch": 3}
    shift = _EPOCH_SHIFT_NS if script.timings == "elsewhere" else 0
    marks = {
        "received": witness.received_ns,
        "queued": witness.queued_ns,
        "scheduled": witness.scheduled_ns,
        "prefill_end": witness.prefill_end_ns,
        "first_written": first_written_ns,
        "last_token": witness.last_token_ns,
    }
    found["marks"] = {name: mark + shift for name, mark in marks.items() if mark}
    identity = host_identity()
    here = {"host_id": identity.host_id, "boot_id": identity.boot_id, "time_namespace": identity.time_namespace}
    found["host"] = ELSEWHERE if script.timings == "elsewhere" else here
    return found


def server_timing_of(witness: Witness) -> str:
    """The header as a server writes it that knows its queue and its prefill."""
    queue, prefill = (
        _ms(witness.queued_ns, witness.scheduled_ns),
        _ms(witness.scheduled_ns, witness.prefill_end_ns),
    )
    return f"queue;dur={queue:.3f}, prefill;dur={prefill:.3f}"


def spans_of(script: Script, witness: Witness, *, wall_minus_mono_ns: int) -> bytes | None:
    """An OTLP body (protobuf) with the engine's spans; None where the request carried no trace."""
    parsed = parse_traceparent(witness.headers.get("traceparent", ""))
    if parsed is None:
        return None
    trace_id, parent_id, _ = parsed
    end_ns = witness.last_token_ns or witness.ended_ns or witness.gone_ns
    body = ExportTraceServiceRequest()
    resource = body.resource_spans.add()
    resource.resource.attributes.add(key="service.name").value.string_value = "scripted-engine"
    spans = resource.scope_spans.add().spans
    root = secrets.token_bytes(8)

    def add(name: str, span_id: bytes, parent: bytes, start_ns: int, stop_ns: int) -> Any:
        return spans.add(
            trace_id=bytes.fromhex(trace_id),
            span_id=span_id,
            parent_span_id=parent,
            name=name,
            kind=Span.SPAN_KIND_SERVER if name == semconv.SPAN_LLM_REQUEST else Span.SPAN_KIND_INTERNAL,
            start_time_unix_nano=start_ns + wall_minus_mono_ns,
            end_time_unix_nano=stop_ns + wall_minus_mono_ns,
        )

    request = add(semconv.SPAN_LLM_REQUEST, root, bytes.fromhex(parent_id), witness.received_ns, end_ns)
    for name, start, stop in (
        (semconv.LATENCY_QUEUE, witness.queued_ns, witness.scheduled_ns),
        (semconv.LATENCY_PREFILL, witness.scheduled_ns, witness.prefill_end_ns),
        (semconv.LATENCY_DECODE, witness.prefill_end_ns, witness.last_token_ns),
        (semconv.LATENCY_TTFT, witness.received_ns, witness.prefill_end_ns),
        (semconv.LATENCY_E2E, witness.received_ns, end_ns),
    ):
        if start and stop:
            request.attributes.add(key=name).value.double_value = (stop - start) / 1e9
    for name, count in (
        (semconv.GEN_AI_INPUT_TOKENS, script.input_tokens),
        (semconv.GEN_AI_OUTPUT_TOKENS, sum(event.tokens for event in witness.token_events)),
    ):
        request.attributes.add(key=name).value.int_value = count
    if script.spans == "children":
        for name, start, stop in (
            (semconv.SPAN_QUEUE, witness.queued_ns, witness.scheduled_ns),
            (semconv.SPAN_PREFILL, witness.scheduled_ns, witness.prefill_end_ns),
            (semconv.SPAN_DECODE, witness.prefill_end_ns, witness.last_token_ns),
        ):
            if start and stop:
                add(name, secrets.token_bytes(8), root, start, stop)
    data: bytes = body.SerializeToString()
    return data


def _ms(start_ns: int, end_ns: int) -> float:
    return (end_ns - start_ns) / 1e6
