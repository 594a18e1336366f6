"""The timing conformance of the whole line, with each of the sixteen combinations of the [token_interval] switches."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest
from closing_rig import check_samples, check_streams, check_whole, is_engines_own, records_of
from line_rig import Line, line
from switches_rig import switches_of, use

pytestmark = pytest.mark.e2e

COMBINATIONS = ["".join(digits) for digits in product("01", repeat=4)]
STREAMS, WHOLE = 500, 60
FORWARD_MS = 5.0
TOLD_ON_THE_PAGE = ("async_scheduling", "slot_reuse")
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_ratio")


@pytest.fixture(scope="module")
def texts_of_others() -> dict[str, list[str]]:
    """What the combinations so far answered."""
    return {}


@pytest.mark.parametrize("combination", COMBINATIONS)
async def test_every_timeline_closes_and_every_answer_is_the_same(
    tmp_path: Path, combination: str, texts_of_others: dict[str, list[str]], record_property: Any
) -> None:
    switches = switches_of(combination)
    variables = {
        "TOKENLINE_SIMULATED__FORWARD_MS": f"{FORWARD_MS:g}",
        "TOKENLINE_SIMULATED__PREFILL_TOKEN_US": "20",
        "TOKENLINE_SCHEDULER__MAX_NUM_SEQS": "4",
        **{f"TOKENLINE_TOKEN_INTERVAL__{name.upper()}": str(on).lower() for name, on in switches.items()},
    }
    with line(tmp_path, "--device", "simulated", **variables) as up:
        (info,) = [row for row in up.metrics().splitlines() if row.startswith("tokenline_engine_info{")]
        assert all(f'{name}="{str(switches[name]).lower()}"' in info for name in TOLD_ON_THE_PAGE), info
        await check_streams(up, STREAMS, record_property)
        check_samples(up, STREAMS)
        await check_whole(up, WHOLE, record_property)
        headers = {"authorization": f"Bearer {up.key}", "x-tokenline-timings": "include"}
        async with httpx.AsyncClient(base_url=up.base_url, headers=headers, timeout=60) as client:
            texts, left = await use(client, FORWARD_MS)
        await check_who_left(up, [found["x-tokenline-request-id"] for found in left])
        until_all_is_free(up)
    texts_of_others[combination] = texts
    assert len({tuple(found) for found in texts_of_others.values()}) == 1


async def check_who_left(up: Line, request_ids: list[str]) -> None:
    """Aborted requests have the engine's spans of what they reached, when the abort took effect, and what was made in
    vain."""
    for record in await records_of(up, request_ids, spans=True):
        assert record["outcome"] == "client_cancelled"
        (request,) = [span for span in record["spans"] if span["name"] == "llm_request"]
        assert is_engines_own(request)
        told = request["attributes"]
        assert told["tokenline.request_id"] == record["request_id"]
        assert told["gen_ai.response.finish_reasons"] == ["abort"]
        assert 0 <= told["tokenline.abort_propagation_seconds"] < 1
        assert told["tokenline.wasted_tokens"] >= 0
        below = {span["name"] for span in record["spans"] if span["parent_id"] == request["span_id"]}
        assert {"queue", "prefill"} <= below


def until_all_is_free(up: Line) -> None:
    up.until_metric(2, "tokenline_engine_request_success_total", finished_reason="abort")
    assert [up.metric(f"tokenline_engine_{name}") for name in GAUGES] == [0, 0, 0]
