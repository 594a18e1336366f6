"""The headers that the relay adds, passes on, and keeps to itself."""

from pathlib import Path

import pytest
from gateway_rig import ANSWER, rig, whole

from protocol.ids import parse_traceparent


async def test_ids_come_back_on_every_answer_and_the_upstream_is_a_child_of_its_attempt(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        r.upstream.script = whole(ANSWER)
        trace = "4bf92f3577b34da6a3ce929d0e0e4736"
        headers = {
            "x-request-id": "mine-1", "x-tokenline-request-id": "req_not-mine-to-say",
            "traceparent": f"00-{trace}-00f067aa0ba902b7-01", "tracestate": "a=b",
        }  # fmt: skip
        r.client.headers.update(headers)
        answer = await r.chat()
        ledger = await r.ledger()
        assert answer.headers["x-request-id"] == "mine-1"
        assert answer.headers["x-tokenline-request-id"] == ledger.request_id != "mine-1"
        assert parse_traceparent(answer.headers["traceparent"]) == (trace, ledger.span_id, 1)
        assert ledger.parent_span_id == "00f067aa0ba902b7"
        sent = r.upstream.headers[0]
        assert parse_traceparent(sent["traceparent"]) == (trace, ledger.attempts[0].span_id, 1)
        assert sent["tracestate"] == "a=b"
        assert sent["x-request-id"] == sent["x-tokenline-request-id"] == ledger.request_id
        assert "authorization" not in sent


@pytest.mark.parametrize("bad", ["00-short-1-01", "00-" + "0" * 32 + "-" + "1" * 16 + "-01", "ff-" + "1" * 32])
async def test_an_invalid_traceparent_starts_a_new_trace_and_drops_tracestate(tmp_path: Path, bad: str) -> None:
    async with rig(tmp_path) as r:
        r.client.headers.update({"traceparent": bad, "tracestate": "a=b", "x-request-id": "bad id"})
        answer = await r.chat()
        ledger = await r.ledger()
        assert ledger.parent_span_id is None
        assert "tracestate" not in r.upstream.headers[0]
        assert answer.headers["x-request-id"] == ledger.request_id


async def test_a_client_gets_no_upstream_cookie_and_an_upstream_no_client_credential(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        r.upstream.script = whole(ANSWER, **{"set-cookie": "a=b", "x-request-id": "up-7", "x-ratelimit-limit": "9"})
        r.client.headers.update({"cookie": "c=d", "x-custom": "kept", "x-tokenline-timings": "include"})
        answer = await r.chat()
        assert "set-cookie" not in answer.headers
        assert answer.headers["x-ratelimit-limit"] == "9"
        sent = r.upstream.headers[0]
        assert not {"cookie", "authorization", "x-tokenline-timings"} & set(sent)
        assert sent["x-custom"] == "kept"
        assert (await r.ledger()).attempts[0].upstream_request_id == "up-7"
