"""Stop strings: found however the text is cut, and never shown in part."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend_engine.text.stops import StopFinder

SMALL = st.text(alphabet="abñ漢 ", max_size=30)
STOPS = st.lists(st.text(alphabet="abñ漢 ", min_size=1, max_size=4), min_size=1, max_size=4)


def shown(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    finder = StopFinder(stops)
    text = "".join([finder.push(piece) for piece in pieces])
    return text + ("" if finder.found else finder.finish()), finder.found


def expected(stops: list[str], text: str) -> tuple[str, bool]:
    """Letter by letter: the first moment at which the text ends in a stop string."""
    for end in range(1, len(text) + 1):
        matching = [stop for stop in stops if text[:end].endswith(stop)]
        if matching:
            return text[: end - max(map(len, matching))], True
    return text, False


@given(stops=STOPS, text=SMALL, cuts=st.lists(st.integers(0, 30), max_size=10))
def test_the_answer_is_the_same_however_it_is_cut(stops: list[str], text: str, cuts: list[int]) -> None:
    edges = sorted({0, len(text), *(at % (len(text) + 1) for at in cuts)})
    pieces = [text[start:end] for start, end in pairwise(edges)]
    assert shown(stops, pieces) == expected(stops, text)


@given(stops=STOPS, text=SMALL)
def test_what_may_begin_a_stop_string_is_held_back_and_nothing_else(stops: list[str], text: str) -> None:
    finder = StopFinder(stops)
    so_far = ""
    for end, letter in enumerate(text, start=1):
        so_far += finder.push(letter)
        if finder.found:
            break
        beginnings = [stop[:size] for stop in stops for size in range(1, len(stop))]
        held = max((len(start) for start in beginnings if text[:end].endswith(start)), default=0)
        assert so_far == text[: end - held]


def test_nothing_is_shown_after_a_stop_string() -> None:
    finder = StopFinder(["END"])
    assert [finder.push(piece) for piece in ("a E", "N", "D b", "c")] == ["a ", "", "", ""]
    assert finder.found


def test_text_that_only_began_like_a_stop_string_comes_at_the_end() -> None:
    finder = StopFinder(["\n\nUser:"])
    assert finder.push("yes\n\nUse") == "yes"
    assert finder.finish() == "\n\nUse"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopFinder(["a", ""])
