"""Every row of the table of causes: a request that deserves it, judged against what is usual."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from judging import Court, delayed
from ledgers import ELSEWHERE, attempt, ledger, timings

from protocol.timings import EngineState
from tracing.ledger import Ledger, Outcome, Usage
from tracing.observer.causes import TABLE, Cause, remedy
from tracing.observer.texts import LANGUAGES, placeholders, texts

MS = 1_000_000
NO_ANSWER = {"first_event": None, "first_token": None, "first_visible": None, "first_token_written": None}
NEVER_ADMITTED = {"admitted": None, "attempts": [], "timings": None, **NO_ANSWER, "last_token": None}


class Case(NamedTuple):
    """A request, what is usual, and what its verdict says."""

    made: Ledger
    stage: str | None
    confidence: str
    usual: Ledger | None = None
    settings: dict[str, Any] = {}  # noqa: RUF012  never changed


def engine_at(running: int = 3, waiting: int = 1, kv_usage: float = 0.25, batch: int = 4) -> EngineState:
    return EngineState(running=running, waiting=waiting, kv_usage=kv_usage, batch=batch)


def prompt_of(tokens: int, computed: int) -> dict[str, Any]:
    usage = Usage(input_tokens=tokens, output_tokens=51, cached_tokens=tokens - computed, source="usage")
    return {"usage": usage, "timings": timings(prompt_n=computed)}


def slow_decode(**reported: Any) -> Ledger:
    """Each of 50 steps took 6 ms longer."""
    return delayed(180, 300, timings=timings(**reported))


def failed(outcome: Outcome, code: str, **changes: Any) -> Ledger:
    return ledger(outcome=outcome, error_code=code, **changes)


CASES = {
    "gateway_queue.raise_max_concurrent": Case(delayed(6, 500), "gateway_queue", "high"),
    "gateway_queue.enlarge_gateway_queue": Case(
        failed(Outcome.QUEUE_REJECTED, "queue_full", status=429, **NEVER_ADMITTED), "gateway_queue", "high"
    ),
    "gateway_busy.relieve_gateway": Case(delayed(80, 200, loop_lag_ns=190 * MS), "transit_back", "high"),
    "upstream_failure.replace_upstream": Case(
        delayed(
            6.5,
            400,
            attempts=[
                attempt(1, upstream="dead", connected=None, request_sent=None, end=300.0, error="connect", status=0),
                attempt(2, connect_start=6.5),
            ],
        ),
        "failed_attempts",
        "high",
    ),
    "upstream_failure.mend_upstream": Case(
        failed(
            Outcome.UPSTREAM_ERROR,
            "upstream_failed",
            attempts=[attempt(error="protocol")],
            timings=None,
            **NO_ANSWER,
        ),
        "upstream_wait",
        "high",
    ),
    "upstream_failure.revive_upstreams": Case(
        failed(Outcome.UPSTREAM_ERROR, "upstream_unavailable", attempts=[], timings=None, upstream="none", **NO_ANSWER),
        "connect",
        "high",
    ),
    "network.check_link": Case(delayed(8.5, 300), "connect", "high"),
    "network.check_client_link": Case(
        delayed(3, 300, client_rtt_ns=180 * MS), "receive", "high", ledger(client_rtt_ns=20 * MS)
    ),
    "engine_queue.enlarge_kv_cache": Case(
        delayed(30.5, 500, timings=timings(engine=engine_at(kv_usage=0.93))), "engine_queue", "high"
    ),
    "engine_queue.raise_max_num_seqs": Case(
        delayed(30.5, 500, timings=timings(engine=engine_at(running=32, batch=32))), "engine_queue", "high"
    ),
    "engine_queue.spread_load": Case(delayed(30.5, 500), "engine_queue", "high"),
    "long_uncached_prompt.shorten_prompt": Case(
        delayed(75.5, 300, **prompt_of(250, 250)), "engine_prefill", "high", ledger(**prompt_of(31, 31))
    ),
    "long_uncached_prompt.keep_prefix": Case(
        delayed(75.5, 300, **prompt_of(250, 240)), "engine_prefill", "high", ledger(**prompt_of(250, 30))
    ),
    "prefill_squeezed.tune_batched_tokens": Case(delayed(75.5, 300), "engine_prefill", "high"),
    "large_batch.lower_max_num_seqs": Case(slow_decode(mean_batch=16.0), "streaming", "high"),
    "large_batch.enable_chunked_prefill": Case(
        slow_decode(), "streaming", "medium", settings={"scheduler": {"enable_chunked_prefill": False}}
    ),
    "long_output.bound_output": Case(
        delayed(180, 900, usage=Usage(input_tokens=31, output_tokens=501, source="usage")), "streaming", "high"
    ),
    "preempted.enlarge_kv_cache": Case(slow_decode(preemptions=2, preempted_ms=250.0), "streaming", "high"),
    "slow_client.check_client_reading": Case(
        delayed(185, 300, backpressure_ns=280 * MS, unsent_bytes=4000), "streaming", "high"
    ),
    "slow_client.check_client_upload": Case(delayed(3, 300), "receive", "high"),
    "slow_upstream.ask_upstream": Case(delayed(80, 300, timings=None), "upstream_wait", "high", ledger(timings=None)),
    "slow_upstream.shrink_token_gap": Case(slow_decode(token_gap_ms=260.0), "streaming", "high"),
    "slow_upstream.free_engine_cpu": Case(delayed(12.5, 300), "engine_tokenize", "high"),
    "slow_upstream.check_device": Case(
        delayed(75.5, 300, timings=timings(engine=engine_at(running=1, batch=1))), "engine_prefill", "high"
    ),
    "slow_upstream.check_timeout": Case(
        failed(
            Outcome.UPSTREAM_TIMEOUT,
            "upstream_timeout",
            status=504,
            timings=None,
            attempts=[attempt(error="first_byte", upstream_headers=None, upstream_first_byte=None, status=0)],
            **NO_ANSWER,
        ),
        "upstream_wait",
        "high",
    ),
    "none.nothing": Case(ledger(), None, "high"),
    "none.mend_request": Case(
        failed(Outcome.AUTH_ERROR, "unknown_key", status=401, authenticated=None, **NEVER_ADMITTED), "auth", "high"
    ),
    "unknown.check_gateway": Case(delayed(1, 300, loop_lag_ns=20 * MS), "auth", "low"),
    "unknown.check_host": Case(delayed(10.5, 300), "transit_out", "low"),
    "unknown.measure_link": Case(
        delayed(80, 300, timings=timings(ELSEWHERE)), "transit", "low", ledger(timings=timings(ELSEWHERE))
    ),
    "unknown.gather_evidence": Case(
        delayed(75.5, 300, timings=timings(engine=None, prompt_n=None)), "engine_prefill", "low"
    ),
    "unknown.read_gateway_log": Case(failed(Outcome.GATEWAY_ERROR, "internal_error", status=500), "closing", "low"),
}


def court_of(case: Case) -> Court:
    return Court(**case.settings).knows(case.usual)


@pytest.mark.parametrize("name", [row.name for row in TABLE])
def test_each_row_is_found_in_a_request_that_deserves_it(name):
    case = CASES[name]
    found = court_of(case).verdict(case.made)
    assert (f"{found['cause']}.{found['action_id']}", found["stage"], found["confidence"]) == (
        name,
        case.stage,
        case.confidence,
    )


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("name", [row.name for row in TABLE])
def test_each_row_is_told_in_full_in_both_languages(name, language):
    case = CASES[name]
    found = court_of(case).verdict(case.made, language)
    for text in (found["text"], found["action"]):
        assert text
        assert not re.search(r"[{}\[\]]|(?<!\S)-(?!\S)|None", text), text
    assert bool(re.search(r"[\u4e00-\u9fff]", found["text"])) == (language == "zh")


def test_no_case_is_for_a_row_that_is_gone():
    assert sorted(CASES) == sorted(row.name for row in TABLE)


def test_every_cause_has_a_row_and_every_row_a_name_of_its_own():
    assert {row.cause for row in TABLE} == set(Cause)
    assert len({row.name for row in TABLE}) == len(TABLE)
    with pytest.raises(KeyError):
        remedy(Cause.NONE, "buy_hardware")


def test_both_languages_have_the_same_texts_with_the_same_values():
    english, chinese = texts("en"), texts("zh")
    assert english.keys() == chinese.keys()
    for key, text in english.items():
        assert placeholders(text) == placeholders(chinese[key]), key
    told = {key.split(".", 1)[1] for key in english if key.startswith(("reason.", "advice."))}
    assert told == {row.name for row in TABLE}


def test_chinese_texts_have_chinese_punctuation():
    assert [text for text in texts("zh").values() if re.search(r"[\u4e00-\u9fff][,:;()]", text)] == []


def test_the_documentation_has_the_table_as_it_is():
    page = (Path(__file__).parents[2] / "docs" / "verdict.md").read_text()
    written = re.findall(r"^\| `(\w+)` \| `(\w+)` \| (.+?) \| (.+) \|$", page, re.MULTILINE)
    assert written == [(row.cause.value, row.action, row.when, _advice(row.name)) for row in TABLE]


def _advice(name: str) -> str:
    """The advice as documentation has it: settings as code."""
    text = re.sub(r"\{([a-z_]+\.[a-z_]+)\}", r"`\1`", texts("en")[f"advice.{name}"])
    return re.sub(r"\{(\w+)\}", r"*\1*", text)
