"""The OTLP/HTTP receiver against senders that are broken, hostile, unknown or too many."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from google.rpc.status_pb2 import Status
from hypothesis import given, settings, strategies
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceResponse,
)
from receiver_rig import Rig, proto_span, request

from tracing.clock import FakeClock
from tracing.observer import receiver as receiver_module
from tracing.observer.gate import Gate

PROTOBUF = "application/x-protobuf"
JSON = "application/json"
RECORDED = Path(__file__).parents[1] / "data" / "vllm-otlp-span.json"


async def test_deflate_and_gzip_of_several_members_are_taken() -> None:
    rig = Rig()
    body = request(proto_span()).SerializeToString()
    assert (await rig.post(zlib.compress(body), content_encoding="deflate")).status_code == 200
    assert (await rig.post(gzip.compress(body[:20]) + gzip.compress(body[20:]), content_encoding="gzip")).is_success
    assert (await rig.post(body, content_encoding="identity")).status_code == 200
    assert len(rig.spans) == 3


ANOMALIES = [
    ({"start_time_unix_nano": 0}, "span_zero_time", 0),
    ({"end_time_unix_nano": 0}, "span_zero_time", 0),
    ({"end_time_unix_nano": 5}, "span_negative", 0),
    ({"end_time_unix_nano": 2**63}, "span_beyond_2262", 0),
    (
        {"start_time_unix_nano": 1_796_000_400_000_000_000, "end_time_unix_nano": 1_796_000_401_000_000_000},
        "span_future",
        1,
    ),
    ({"start_time_unix_nano": 1, "end_time_unix_nano": 2}, None, 1),
    ({"start_time_unix_nano": 1_796_000_200_000_000_000, "end_time_unix_nano": 1_796_000_200_000_000_000}, None, 1),
]


@pytest.mark.parametrize(("times", "kind", "taken"), ANOMALIES)
async def test_times_that_cannot_be_right_are_counted_by_kind(
    times: dict[str, int], kind: str | None, taken: int
) -> None:
    rig = Rig()
    await rig.post(request(proto_span(**times)).SerializeToString())
    assert dict(rig.anomalies) == ({kind: 1} if kind else {})
    assert len(rig.spans) == taken


def json_body(*spans: Any) -> bytes:
    return json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": list(spans)}]}]}).encode()


GOOD_JSON = {
    "traceId": "0af7651916cd43dd8448eb211c80319c",
    "spanId": "347fff261231e6a5",
    "name": "good",
    "startTimeUnixNano": "1796000000000000000",
    "endTimeUnixNano": "1796000001000000000",
}


@pytest.mark.parametrize(
    "bad",
    [
        {**GOOD_JSON, "startTimeUnixNano": "-5"},
        {**GOOD_JSON, "name": 5},
        {**GOOD_JSON, "attributes": "no list"},
        {**GOOD_JSON, "attributes": [{"key": "n", "value": {"intValue": "9" * 40}}]},
        {**GOOD_JSON, "name": "\ud800"},
        {**GOOD_JSON, "links": [5]},
        {**GOOD_JSON, "status": [1]},
        "not an object",
        None,
        7,
    ],
    ids=str,
)
async def test_a_json_span_that_cannot_be_read_is_refused_alone(bad: Any) -> None:
    rig = Rig()
    answer = await rig.post(json_body(GOOD_JSON, bad, GOOD_JSON), "application/json")
    assert answer.status_code == 200
    partial = answer.json()["partialSuccess"]
    assert partial["rejectedSpans"] == "1"
    assert partial["errorMessage"]
    assert [span.name for span in rig.spans] == ["good", "good"]
    assert (rig.accepted, rig.rejected) == (2, 1)


nonsense = strategies.recursive(
    strategies.none() | strategies.booleans() | strategies.integers() | strategies.floats() | strategies.text(),
    lambda inner: (
        strategies.lists(inner, max_size=3)
        | strategies.dictionaries(
            strategies.sampled_from(["resourceSpans", "scopeSpans", "spans", "traceId", "spanId", "attributes", "key",
                                     "value", "events", "links", "resource", "scope", "intValue", "kvlistValue"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(nonsense)
async def test_no_json_makes_the_receiver_fail(value: Any) -> None:
    answer = await Rig().post(json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [value]}]}]}).encode(), JSON)
    assert answer.status_code in (200, 400)
    assert (await Rig().post(json.dumps(value).encode(), JSON)).status_code in (200, 400)


@settings(max_examples=150, deadline=None)
@given(strategies.binary(max_size=300))
async def test_no_bytes_make_the_receiver_fail(noise: bytes) -> None:
    body = request(proto_span()).SerializeToString()
    for garbage in (noise, body[: len(noise)] + noise, noise + body):
        assert (await Rig().post(garbage)).status_code in (200, 400)
    for encoding in ("gzip", "deflate"):
        assert (await Rig().post(noise, content_encoding=encoding)).status_code == 400


async def test_a_body_of_too_many_spans_is_taken_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tracing.observer.otlp.MAX_SPANS", 3)
    rig = Rig()
    answer = await rig.post(request(*[proto_span()] * 5).SerializeToString())
    partial = ExportTraceServiceResponse.FromString(answer.content).partial_success
    assert partial.rejected_spans == 2
    assert "smaller batches" in partial.error_message
    assert len(rig.spans) == 3


@pytest.mark.parametrize(
    ("offered", "status"),
    [
        (None, 401),
        ("Bearer wrong", 401),
        ("Bearer ", 401),
        ("Basic the-token", 401),
        ("Bearer the-tokens", 401),
        ("Bearer the-token", 200),
        ("bearer  the-token ", 200),
    ],
)
async def test_with_a_token_only_who_knows_it_is_let_in(offered: str | None, status: int) -> None:
    rig = Rig(token="the-token")
    headers = {} if offered is None else {"authorization": offered}
    answer = await rig.post(request(proto_span()).SerializeToString(), **headers)
    assert answer.status_code == status
    assert len(rig.spans) == (status == 200)
    if status == 401:
        assert answer.headers["www-authenticate"] == "Bearer"
        told = Status.FromString(answer.content)
        assert (told.code, "server.otlp_token" in told.message) == (16, True)


async def test_a_stranger_is_turned_away_before_the_body_is_read() -> None:
    read: list[bytes] = []

    async def body() -> AsyncIterator[bytes]:
        read.append(b"x")
        yield b"x"

    rig = Rig(token="the-token")
    assert (await rig.http.post("/v1/traces", content=body(), headers={"content-type": "text/x"})).status_code == 401


async def test_beyond_its_share_of_time_the_receiver_refuses_and_says_when_to_come_again() -> None:
    cpu = iter(range(0, 1000, 1))
    rig = Rig(cpu_seconds=lambda: next(cpu))  # every reading costs a second, every handing on another
    body = request(proto_span()).SerializeToString()
    assert (await rig.post(body)).status_code == 200
    answer = await rig.post(body)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert Status.FromString(answer.content).code == 14
    as_json = await rig.post(b"{}", "application/json")
    assert (as_json.status_code, as_json.json()["code"]) == (503, 14)
    assert rig.counted["overloaded"] == 2
    assert len(rig.spans) == 1
    rig.clock.advance_ms(1)
    assert (await rig.post(body)).status_code == 200, "half a second of time comes back with every second"


async def test_a_body_that_cannot_be_read_costs_its_senders_time_too() -> None:
    cpu = iter(range(0, 1000, 2))
    rig = Rig(cpu_seconds=lambda: next(cpu))
    assert (await rig.post(b"\xff garbage")).status_code == 400
    assert (await rig.post(request(proto_span()).SerializeToString())).status_code == 503


def test_the_gate_saves_up_time_for_a_burst_and_no_more() -> None:
    clock = FakeClock()
    gate = Gate(clock, bodies=2, share=0.5, burst_seconds=2.0)
    assert gate.enter()
    assert gate.enter()
    assert not gate.enter(), "two bodies are held"
    gate.leave()
    gate.spend(3.0)
    assert not gate.enter(), "a second more was spent than there was"
    clock.advance_ms(1999)
    assert not gate.enter()
    clock.advance_ms(2)
    assert gate.enter()
    gate.leave()
    clock.advance_ms(3_600_000)
    assert gate.enter()
    gate.leave()
    gate.spend(2.0)
    assert not gate.enter(), "an hour's rest is worth a burst, not an hour"


def test_limits_are_what_the_documentation_says() -> None:
    assert (receiver_module.MAX_BODY_BYTES, receiver_module.RETRY_AFTER_SECONDS) == (16 * 2**20, 1)
