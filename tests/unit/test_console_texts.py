"""The console's texts: both languages say everything, with the same places for values."""

from __future__ import annotations

import re
from string import Formatter

import pytest

from cli.announce import Facts, lines_of
from dashboards.console.chinese import TEXTS as CHINESE
from dashboards.console.english import TEXTS as ENGLISH
from dashboards.console.rendering import ms, time
from dashboards.console.texts import Texts, language
from tracing.stages import DESCRIPTIONS, STAGES


def places(text: str) -> set[str]:
    return {name for _, name, _, _ in Formatter().parse(text) if name}


def test_both_languages_say_the_same_things_with_the_same_places() -> None:
    assert CHINESE.keys() == ENGLISH.keys()
    for key, text in ENGLISH.items():
        assert places(text) == places(CHINESE[key]), key


def test_every_stage_is_defined_in_both_languages() -> None:
    for name in {*STAGES, *DESCRIPTIONS}:
        for texts in (ENGLISH, CHINESE):
            assert texts[f"stage_{name}"]
        assert re.search(r"[一-鿿]", CHINESE[f"stage_{name}"]), name


@pytest.mark.parametrize(
    ("asked", "accepted", "expected"),
    [
        ("zh", "en", "zh"),
        ("en", "zh-CN", "en"),
        ("", "zh-CN,zh;q=0.9,en;q=0.8", "zh"),
        ("", "en-GB,en;q=0.9,zh;q=0.8", "en"),
        ("", "de, zh-Hans;q=0.4, en;q=0.2", "zh"),
        ("", "de", "en"),
        ("", "", "en"),
        ("", "zh;q=nonsense", "en"),
        ("", "zh;q=1.2.3", "en"),
        ("../../etc", "en", "en"),
        ("", "," * 5_000, "en"),
    ],
)
def test_the_language_is_the_one_asked_for_else_the_browsers_best(asked: str, accepted: str, expected: str) -> None:
    assert language(asked, accepted) == expected


def test_braces_in_a_value_mean_nothing() -> None:
    assert "{0.__class__}{x}" in Texts("en")("missing_head", id="{0.__class__}{x}")


@pytest.mark.parametrize(
    ("value", "headline", "column"),
    [
        (None, "–", "–"), (0.0, "0.00 ms", "0.00"), (3.456, "3.46 ms", "3.46"), (81.5, "81.5 ms", "81.50"),
        (2572.01, "2,572 ms", "2,572.01"), (12_345.6, "12.35 s", "12,345.60"), (-1.0, "-1.00 ms", "-1.00"),
    ],
)  # fmt: skip
def test_times_are_written_for_their_size(value: float | None, headline: str, column: str) -> None:
    assert (time(value), ms(value)) == (headline, column)


def test_up_prints_where_the_console_is_and_what_opens_it() -> None:
    facts = Facts(
        base_url="http://h/api", key="sk-made", model="m", ops_url="http://127.0.0.1:9464", admin_key_at="/s/admin-key"
    )
    assert "  console   http://127.0.0.1:9464/console (opens with the key in /s/admin-key)" in lines_of(facts)
    assert not any("console" in line for line in lines_of(Facts(base_url="http://h/api", key="k", model="m")))
