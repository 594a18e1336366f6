"""When export is on, where to, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from opentelemetry.sdk.resources import Resource

from settings.schema import Settings
from tracing.observer.export import ExportError, endpoint_of, exporter_from_environment, is_own_receiver, readable
from tracing.spans import Span, SpanKind, SpanStatus


def settings(otlp_host: str = "127.0.0.1", otlp_port: int = 14318) -> Settings:
    server = {"otlp_host": otlp_host, "otlp_port": otlp_port}
    return Settings.model_validate({"state_dir": Path("/state"), "server": server})


@pytest.mark.parametrize(
    ("environment", "endpoint"),
    [
        ({}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, "http://c:4318/v1/traces"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318/base/"}, "http://c:4318/base/v1/traces"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://t/here"}, "http://t/here"),
        (
            {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://t/here", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c"},
            "http://t/here",
        ),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_SDK_DISABLED": "true"}, None),
    ],
)
def test_the_endpoint_is_found_by_opentelemetrys_rules(environment: dict[str, str], endpoint: str | None) -> None:
    assert endpoint_of(environment) == endpoint


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:14318"}, "own OTLP receiver"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:14318/v1/traces"}, "server.otlp_port"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4317"}, "is not an http(s) URL"),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "use http/protobuf",
        ),
    ],
)
def test_an_export_that_cannot_work_is_refused_by_name(environment: dict[str, str], words: str) -> None:
    with pytest.raises(ExportError) as refusal:
        exporter_from_environment(settings(), environment)
    assert words in str(refusal.value)
    assert "OTEL_" in str(refusal.value) or "OTLP" in str(refusal.value)


@pytest.mark.parametrize(
    ("host", "port", "otlp_host", "own"),
    [
        ("127.0.0.1", 14318, "127.0.0.1", True),
        ("localhost", 14318, "127.0.0.1", True),
        ("127.0.0.1", 14318, "0.0.0.0", True),
        ("127.0.0.1", 4318, "127.0.0.1", False),
        ("192.0.2.7", 14318, "127.0.0.1", False),
        ("192.0.2.7", 14318, "0.0.0.0", False),
    ],
)
def test_our_own_receiver_is_known_by_every_name(host: str, port: int, otlp_host: str, own: bool) -> None:
    assert is_own_receiver(host, port, settings(otlp_host)) is own


def test_a_span_keeps_its_ids_parent_times_and_status_for_the_sdk() -> None:
    span = Span(
        "0af7651916cd43dd8448eb211c80319c",
        "00000000000000ff",
        "POST /v1/chat/completions",
        5,
        9,
        parent_id="b7ad6b7169203331",
        kind=SpanKind.SERVER,
        status=SpanStatus.ERROR,
        status_message="upstream_timeout",
        trace_state="a=b",
    )
    made = readable(span, Resource({"service.name": "x"}))
    assert made.context is not None
    assert made.parent is not None
    assert f"{made.context.trace_id:032x}" == span.trace_id
    assert f"{made.context.span_id:016x}" == span.span_id
    assert f"{made.parent.span_id:016x}" == span.parent_id
    assert made.parent.is_remote
    assert made.context.trace_flags.sampled
    assert made.context.trace_state.to_header() == "a=b"
    assert (made.start_time, made.end_time) == (5, 9)
    assert made.status.description == "upstream_timeout"


def test_a_client_spans_parent_is_not_remote() -> None:
    made = readable(Span("1" * 32, "2" * 16, "chat m", 1, 2, "3" * 16, SpanKind.CLIENT), Resource({}))
    assert made.parent is not None
    assert not made.parent.is_remote
