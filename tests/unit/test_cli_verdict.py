"""What `why` and `slow` say of verdicts, in both languages, at eighty columns."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from judging import Court, delayed, row_of
from ledgers import ledger
from rich.cells import cell_len
from rich.text import Text
from test_window_verdict import SLOW, ordinary, request, view_of

from cli.durations import window_of
from cli.language import language_of
from cli.story import story_of
from cli.window_story import window_story_of
from cli.words import WORDS
from cli.wrap import padded, wrapped
from tracing.observer.view import request_view

SLOW_REQUEST = delayed(30.5, 500)


def record(language: str = "en", *, requests: int = 120) -> dict:
    court = Court().knows(requests=requests)
    return request_view(row_of(SLOW_REQUEST), complete=True) | court.explain(SLOW_REQUEST, language)


def plain(lines) -> str:
    return "\n".join(line.plain for line in lines)


def test_the_verdict_comes_first_then_the_timeline_with_what_is_usual():
    page = plain(story_of(record(), cells=80))
    first, second, third, *_ = page.splitlines()
    assert (first, second) == ("req_1", "  Verdict: engine_queue (confidence high)")
    assert third.startswith("  Slow: TTFT was 582 ms")
    assert page.index("What to do:") < page.index("Stages that make up TTFT")
    line = next(line for line in page.splitlines() if line.startswith("  engine_queue"))
    assert re.search(r"518\.00  89\.1 % +17\.94$", line)
    assert "usual: the median of 120 requests of its class" in page


def test_without_a_baseline_there_is_no_column_of_usual_values():
    page = plain(story_of(record(requests=3), cells=80))
    assert "usual ms" not in page
    assert re.search(r"^  engine_queue .* 518\.00  89\.1 %$", page, re.MULTILINE)
    assert "confidence low" in page


@pytest.mark.parametrize("cells", [60, 80, 120])
@pytest.mark.parametrize("language", ["en", "zh"])
def test_every_line_of_a_request_fits_its_width(language, cells):
    lines = plain(story_of(record(language), cells=cells, language=language)).splitlines()
    numbers = [line for line in lines if cell_len(line) > cells]
    assert numbers == []


@pytest.mark.parametrize("language", ["en", "zh"])
def test_a_window_is_shown_stage_by_stage_and_by_prompt_size(tmp_path, language):
    slow = [request(number, late_ms=500, waiting=20) for number in SLOW]
    page = plain(window_story_of(view_of(tmp_path, ordinary() + slow, language), cells=80, language=language))
    assert [line for line in page.splitlines() if cell_len(line) > 80] == []
    row = next(line for line in page.splitlines() if line.startswith("  engine_queue"))
    assert re.search(r"519\.\d\d +18\.\d\d +100\.0 %$", row)
    assert re.search(r"^  <= 256 ", page, re.MULTILINE)
    assert "req_15" in page
    assert ("最近 1h" if language == "zh" else "The last 1h, all models") in page


def test_an_empty_window_is_shown_as_what_it_is(tmp_path):
    page = plain(window_story_of(view_of(tmp_path, []), cells=80))
    assert "No request that ended well began in the last 1h." in page
    assert "Mean of each stage" not in page


def test_both_languages_have_the_same_words_with_the_same_values():
    english, chinese = WORDS["en"], WORDS["zh"]
    assert english.keys() == chinese.keys()
    for key, text in english.items():
        assert set(re.findall(r"{(\w+)}", text)) == set(re.findall(r"{(\w+)}", chinese[key])), key


@pytest.mark.parametrize(
    ("asked", "environ", "language"),
    [
        (None, {}, "en"),
        (None, {"LANG": "zh_CN.UTF-8"}, "zh"),
        (None, {"LANG": "zh_CN.UTF-8", "LC_ALL": "C"}, "en"),
        (None, {"LANG": "de_DE.UTF-8", "LC_ALL": ""}, "en"),
        (None, {"LANG": "en_US", "LC_MESSAGES": "zh_TW"}, "zh"),
        ("en", {"LANG": "zh_CN.UTF-8"}, "en"),
        ("zh", {}, "zh"),
    ],
)
def test_the_language_is_what_was_asked_for_else_the_locales(asked, environ, language):
    assert language_of(asked, environ) == language


@pytest.mark.parametrize(("typed", "sent"), [("1h", "1h"), (" 15M ", "15m"), ("2w", "1209600s"), ("1.5h", "5400s")])
def test_a_window_is_sent_as_it_was_typed_where_that_can_be_read(typed, sent):
    assert window_of("--window", typed) == sent


TEXT = st.text(st.sampled_from(list("ab 。，（）引擎慢12%ms`. ")), max_size=80)


@example("（`111。`", 8)
@given(TEXT, st.integers(8, 40))
def test_wrapped_text_is_all_there_and_in_its_width(text, cells):
    lines = wrapped(text, cells)
    assert "".join("".join(lines).split()) == "".join(text.split())
    # A closing mark stays with its word, and may stand in the margin by that.
    assert all(cell_len(line.rstrip("。，）")) <= cells for line in lines)


def test_chinese_is_broken_between_characters_but_not_inside_words_numbers_or_before_marks():
    text = "请调大 scheduler.max_num_seqs（当前 32），它等了 518 ms，比平时多。"
    for cells in range(30, 60):
        lines = wrapped(text, cells)
        assert all(cell_len(line) <= cells for line in lines)
        assert not any(line[0] in "，。）" or line[-1] == "（" for line in lines)
        assert any("scheduler.max_num_seqs" in line for line in lines)
        assert any("518 ms" in line for line in lines)


def test_padding_counts_cells_not_characters():
    assert padded("占比", 8) == "    占比"
    assert cell_len(padded("share", 8)) == 8
    assert Text(padded("占比", 8)).cell_len == 8


def test_a_request_that_is_not_slow_says_so():
    made = ledger()
    court = Court().knows()
    page = plain(story_of(request_view(row_of(made), complete=True) | court.explain(made), cells=80))
    assert "Verdict: none (confidence high)" in page
    assert "Nothing to do." in page
