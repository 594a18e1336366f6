"""What `why` and `slow` show."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from cli.chart import bar, in_time_order, waterfall
from cli.errors import CliError, Exit
from cli.slow import row_of
from cli.story import show_request, story_of
from cli.why import find_request

RECORD = {
    "request_id": "req_1",
    "client_request_id": "mine",
    "trace_id": "t" * 32,
    "model": "smollm2",
    "upstream": "engine",
    "surface": "chat",
    "stream": True,
    "outcome": "ok",
    "status": 200,
    "error_code": None,
    "started": "2026-11-30T10:00:00+00:00",
    "ttft_ms": 100.0,
    "tpot_ms": 20.5,
    "e2e_ms": 300.0,
    "engine_ttft_ms": 90.0,
    "overhead_ms": 1.5,
    "stages": {"relay": 5.0, "engine_prefill": 60.0, "auth": 10.0, "engine_queue": 20.0},
    "total_ms": 100.0,
    "unaccounted_ms": 5.0,
    "after": {"streaming": 190.0, "closing": 10.0, "engine_decode": 180.0},
    "anomalies": [],
    "engine": {"running": 3, "waiting": 2, "kv_usage": 0.25, "batch": 4},
    "tokens": {"input": 12, "output": 9, "reasoning": None},
    "attempts": [{"number": 1, "upstream": "engine", "error": None, "status": 200}],
    "trace_complete": True,
}


def page(record: dict, width: int = 80, *, blocks: bool = True) -> str:
    return "\n".join(line.plain for line in story_of(record, cells=width, blocks=blocks))


def test_bars_follow_one_another_in_time_and_fill_the_line_together():
    lines = waterfall(in_time_order({"engine_prefill": 50.0, "auth": 25.0, "relay": 25.0}), 100.0, cells=81)
    bars = [line.plain[18:-19] for line in lines]
    assert [line.plain.split()[0] for line in lines] == ["auth", "engine_prefill", "relay"]
    assert [len(found) - len(found.lstrip()) for found in bars] == [0, 11, 33]
    assert [found.count("█") for found in bars] == [11, 22, 11]
    assert [line.plain.rstrip().endswith("%") for line in lines] == [True] * 3


@pytest.mark.parametrize(
    ("start", "ms", "drawn"),
    [
        (0, 100, "█" * 10),
        (50, 50, " " * 5 + "█" * 5),
        (0, 5, "▌"),
        (99.9, 0.1, " " * 9 + "▏"),
        (20, 0.001, "  ▏"),
        (0, 0, ""),
        (50, -10, ""),
        (-10, 20, "██"),
        (100, 5, " " * 9 + "▌"),
        (95, 50, " " * 9 + "█"),
    ],
)
def test_a_bar_stands_where_its_time_was(start, ms, drawn):
    assert bar(start, ms, 100, 10) == drawn


def test_bars_can_be_drawn_without_unicode():
    assert bar(50, 50, 100, 10, blocks=False) == "     #####"
    page(RECORD, blocks=False).encode("ascii")


def test_every_line_fits_eighty_columns():
    assert [line for line in page(RECORD).splitlines() if len(line) > 80] == []


def test_a_page_without_colour_has_every_number():
    out = io.StringIO()
    show_request(RECORD, Console(file=out, width=80, no_color=True, force_terminal=False))
    text = out.getvalue()
    assert "\x1b" not in text
    for words in ("req_1", "mine", "TTFT 100.00 ms", "TPOT 20.50 ms", "E2E 300.00 ms", "60.00  60.0 %"):
        assert words in text
    for words in (
        "unaccounted",
        "streaming",
        "meanwhile engine_decode 180.00 ms",
        "3 running, 2 waiting, KV 25.0 %, batch 4",
    ):
        assert words in text
    assert "Tokens: input 12, output 9" in text
    assert "Attempts" not in text


def test_attempts_are_listed_when_there_was_more_than_one():
    attempts = [
        {"number": 1, "upstream": "a", "error": "connect", "status": 0},
        {"number": 2, "upstream": "b", "status": 200},
    ]
    text = page(RECORD | {"attempts": attempts})
    assert "1. a: connect" in text
    assert "2. b: ok, status 200" in text


def test_a_whole_answer_sums_to_e2e_and_a_residual_is_named():
    text = page(RECORD | {"stream": False, "ttft_ms": None, "tpot_ms": None, "after": {}, "unaccounted_ms": None})
    assert "Stages that make up E2E" in text
    assert "TTFT -" in text
    assert "rest by construction" in text


def test_a_request_that_was_refused_says_that_no_stage_was_measured():
    refused = RECORD | {
        "stages": {},
        "total_ms": None,
        "unaccounted_ms": None,
        "after": {},
        "engine": None,
        "tokens": {},
    }
    assert "no stage was measured" in page(refused | {"outcome": "auth_error", "error_code": "unknown_key"})


def test_a_negative_stage_is_shown_as_it_is():
    text = page(RECORD | {"stages": {"auth": 101.0, "transit_out": -1.0}, "anomalies": ["transit_out"]})
    assert "-1.00" in text
    assert "transit_out came out negative" in text


def test_a_line_of_slow_names_the_largest_stage_or_how_it_failed():
    assert row_of(RECORD | {"cause": "network"})[1:4] == ("TTFT 100 ms", "engine_prefill 60 %", "network")
    assert row_of(RECORD | {"outcome": "upstream_timeout", "ttft_ms": None})[1:3] == ("E2E 300 ms", "upstream_timeout")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_request_that_has_just_ended_is_asked_for_again():
    clock, answers = Clock(), [{"matches": []}, {"matches": [{"request_id": "r"}]}]
    assert find_request(lambda: answers.pop(0), "r", clock=clock, sleep=clock.sleep) == [{"request_id": "r"}]


def test_an_unknown_request_is_not_found_after_two_seconds():
    clock = Clock()

    def ask() -> dict:
        raise CliError("no", Exit.NOT_FOUND)

    with pytest.raises(CliError, match="'r'") as caught:
        find_request(ask, "r", clock=clock, sleep=clock.sleep)
    assert caught.value.code is Exit.NOT_FOUND
    assert 2.0 <= clock.now < 2.5
