"""The OTLP/HTTP receiver: what is taken, what is refused, and with which words."""

from __future__ import annotations

import base64
import gzip
import json
import zlib
from pathlib import Path
from typing import Any

import pytest
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceResponse,
)
from receiver_rig import Rig, proto_span, request

from tracing.observer.receiver import MAX_BODY_BYTES
from tracing.spans import Span, SpanEvent, SpanKind, SpanLink, SpanStatus

PROTOBUF = "application/x-protobuf"
JSON = "application/json"
RECORDED = Path(__file__).parents[1] / "data" / "vllm-otlp-span.json"


async def test_a_protobuf_span_is_taken_with_all_that_it_has() -> None:
    span = proto_span(parent_span_id=bytes.fromhex("b7ad6b7169203331"), kind=2, trace_state="a=b")
    span.attributes.add(key="text").value.string_value = "ü"
    span.attributes.add(key="int").value.int_value = 2**62
    span.attributes.add(key="float").value.double_value = 1.5
    span.attributes.add(key="bool").value.bool_value = True
    span.attributes.add(key="list").value.array_value.values.add().int_value = 1
    span.attributes.add(key="map").value.kvlist_value.values.add(key="k").value.string_value = "v"
    span.attributes.add(key="bytes").value.bytes_value = b"\x01\xff"
    event = span.events.add(name="preempted", time_unix_nano=5)
    event.attributes.add(key="n").value.int_value = 1
    span.links.add(trace_id=b"\x01" * 16, span_id=b"\x02" * 8)
    span.status.code = 2
    span.status.message = "aborted"
    rig = Rig()
    answer = await rig.post(request(span).SerializeToString())
    assert answer.status_code == 200
    assert answer.headers["content-type"] == PROTOBUF
    assert not ExportTraceServiceResponse.FromString(answer.content).HasField("partial_success")
    assert rig.spans == [
        Span(
            trace_id="0af7651916cd43dd8448eb211c80319c",
            span_id="347fff261231e6a5",
            name="llm_request",
            start_ns=1_796_000_000_000_000_000,
            end_ns=1_796_000_001_000_000_000,
            parent_id="b7ad6b7169203331",
            kind=SpanKind.SERVER,
            attributes={
                "text": "ü",
                "int": 2**62,
                "float": 1.5,
                "bool": True,
                "list": [1],
                "map": {"k": "v"},
                "bytes": "01ff",
            },
            events=[SpanEvent("preempted", 5, {"n": 1})],
            links=[SpanLink("01" * 16, "02" * 8)],
            status=SpanStatus.ERROR,
            status_message="aborted",
            resource={"service.name": "engine"},
            scope="scope",
            scope_version="2",
            trace_state="a=b",
        )
    ]
    assert (rig.accepted, rig.rejected) == (1, 0)


async def test_json_ids_are_hex_and_not_base64() -> None:
    rig = Rig()
    answer = await rig.post(RECORDED.read_bytes(), "application/json; charset=utf-8")
    assert answer.status_code == 200
    assert answer.json() == {}
    first, second = rig.spans
    assert first.trace_id == second.trace_id == "0af7651916cd43dd8448eb211c80319c"
    assert (first.span_id, second.span_id) == ("347fff261231e6a5", "dcc2edbc00f03232")
    assert first.parent_id == "b7ad6b7169203331"
    assert first.kind is SpanKind.SERVER
    assert first.start_ns == 1796052451185235456
    assert first.attributes["gen_ai.usage.prompt_tokens"] == 31
    assert first.attributes["gen_ai.latency.time_to_first_token"] == pytest.approx(0.3170745)
    assert first.resource["service.name"] == "vllm-cpu"


async def test_json_and_protobuf_of_one_span_are_one_span() -> None:
    by_json, by_protobuf = Rig(), Rig()
    await by_protobuf.post(request(proto_span()).SerializeToString())
    span = {
        "traceId": "0AF7651916CD43DD8448EB211C80319C",
        "spanId": "347fff261231e6a5",
        "name": "llm_request",
        "startTimeUnixNano": "1796000000000000000",
        "endTimeUnixNano": 1796000001000000000,
        "someFutureField": 1,
    }
    resource = {"attributes": [{"key": "service.name", "value": {"stringValue": "engine"}}]}
    scoped = {"scope": {"name": "scope", "version": "2"}, "spans": [span]}
    body = {"resourceSpans": [{"resource": resource, "scopeSpans": [scoped]}]}
    assert (await by_json.post(json.dumps(body).encode(), "application/json")).status_code == 200
    assert by_json.spans == by_protobuf.spans


async def test_gzip_is_taken() -> None:
    rig = Rig()
    body = gzip.compress(request(proto_span()).SerializeToString())
    assert (await rig.post(body, content_encoding="gzip")).status_code == 200
    assert len(rig.spans) == 1


async def test_a_long_body_is_taken_whole() -> None:
    rig = Rig()
    spans = [proto_span(span_id=number.to_bytes(8, "big")) for number in range(1, 2001)]
    assert (await rig.post(request(*spans).SerializeToString())).status_code == 200
    assert len(rig.spans) == rig.accepted == 2000


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"trace_id": b"\x01" * 24}, "trace id must be 16 bytes"),
        ({"trace_id": bytes(16)}, "not all zero"),
        ({"span_id": b"\x01" * 12}, "span id must be 8 bytes"),
        ({"span_id": b""}, "span id must be 8 bytes"),
        ({"parent_span_id": b"\x01"}, "parent span id"),
        ({"start_time_unix_nano": 0}, "start and end time"),
        ({"end_time_unix_nano": 5}, "end must not lie before"),
        ({"end_time_unix_nano": 2**63}, "beyond the year 2262"),
    ],
)
async def test_a_span_that_cannot_be_right_is_refused_alone_and_by_name(fault: dict[str, Any], words: str) -> None:
    rig = Rig()
    answer = await rig.post(request(proto_span(name="bad", **fault), proto_span()).SerializeToString())
    assert answer.status_code == 200
    partial = ExportTraceServiceResponse.FromString(answer.content).partial_success
    assert partial.rejected_spans == 1
    assert words in partial.error_message
    assert "'bad'" in partial.error_message
    assert len(rig.spans) == 1
    assert (rig.accepted, rig.rejected) == (1, 1)


@pytest.mark.parametrize(
    "trace_id",
    ["not hex", "0af7651916cd43dd 8448eb211c80319c", base64.b64encode(b"\x01" * 16).decode(), "0af7", 5, None, ["a"]],
)
async def test_a_json_id_that_is_not_hex_of_the_right_length_is_refused(trace_id: Any) -> None:
    rig = Rig()
    span = {"traceId": trace_id, "spanId": "347fff261231e6a5", "startTimeUnixNano": "1", "endTimeUnixNano": "2"}
    body = {"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}
    answer = await rig.post(json.dumps(body).encode(), "application/json")
    assert answer.status_code == 200
    assert answer.json()["partialSuccess"]["rejectedSpans"] == "1"
    assert rig.spans == []


REFUSED: list[tuple[str, bytes, str, dict[str, str], int, str]] = [
    ("another content type", b"x", "text/plain", {}, 415, "text/plain"),
    ("no content type", b"x", "", {}, 415, "application/x-protobuf"),
    ("another encoding", b"x", PROTOBUF, {"content_encoding": "br"}, 415, "'br'"),
    ("garbage as protobuf", b"\xff\xff\xff garbage", PROTOBUF, {}, 400, "protobuf"),
    ("garbage as JSON", b"{", "application/json", {}, 400, "JSON"),
    ("JSON of another shape", b"[1]", "application/json", {}, 400, "list"),
    ("JSON with a wrong type", b'{"resourceSpans": 5}', "application/json", {}, 400, "ExportTraceServiceRequest"),
    ("deep JSON", b"[" * 100_000, "application/json", {}, 400, "JSON"),
    ("gzip that is none", b"plain", PROTOBUF, {"content_encoding": "gzip"}, 400, "gzip"),
    ("deflate that is none", b"plain", PROTOBUF, {"content_encoding": "deflate"}, 400, "deflate"),
    ("deflate with a tail", zlib.compress(b"") + b"x", PROTOBUF, {"content_encoding": "deflate"}, 400, "follows"),
    ("no gzip at all", b"", PROTOBUF, {"content_encoding": "gzip"}, 400, "cut short"),
    ("many bombs", gzip.compress(bytes(2**20)) * 99, PROTOBUF, {"content_encoding": "gzip"}, 413, "decompression"),
    ("gzip cut short", gzip.compress(b"x" * 99)[:-9], PROTOBUF, {"content_encoding": "gzip"}, 400, "cut short"),
    ("too large", bytes(MAX_BODY_BYTES + 1), PROTOBUF, {}, 413, "smaller batches"),
    ("a bomb", gzip.compress(bytes(MAX_BODY_BYTES * 4)), PROTOBUF, {"content_encoding": "gzip"}, 413, "decompression"),
]


@pytest.mark.parametrize(
    ("body", "content_type", "headers", "status", "words"),
    [case[1:] for case in REFUSED],
    ids=[case[0] for case in REFUSED],
)
async def test_refused(body: bytes, content_type: str, headers: dict[str, str], status: int, words: str) -> None:
    rig = Rig()
    answer = await rig.post(body, content_type, **headers)
    assert answer.status_code == status
    if content_type == PROTOBUF:
        assert words in Status.FromString(answer.content).message
    else:
        assert words in answer.json()["message"]
    assert rig.spans == []
    assert rig.accepted == 0


async def test_endless_attributes_are_cut_and_nesting_has_a_floor() -> None:
    span = proto_span()
    for number in range(500):
        span.attributes.add(key=f"k{number}").value.string_value = "x" * 20_000
    deep = span.events.add(name="deep", time_unix_nano=1).attributes.add(key="deep").value
    for _ in range(40):
        deep = deep.array_value.values.add()
    deep.int_value = 1
    rig = Rig()
    await rig.post(request(span).SerializeToString())
    (taken,) = rig.spans
    assert len(taken.attributes) == 128
    assert max(len(str(value)) for value in taken.attributes.values()) == 8192
    assert str(taken.events[0].attributes).count("[") <= 8


async def test_only_post_to_the_one_path() -> None:
    http = Rig().http
    wrong_method = await http.get("/v1/traces", headers={"content-type": PROTOBUF})
    assert (wrong_method.status_code, wrong_method.headers["allow"]) == (405, "POST")
    assert "POST at /v1/traces" in Status.FromString(wrong_method.content).message
    wrong_path = await http.post("/v1/metrics", headers={"content-type": "application/json"})
    assert (wrong_path.status_code, wrong_path.json()["code"]) == (404, 5)
