"""Tool calls in an answer's text: found however it is cut, and what is no call is shown as it is."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend_engine.text.tool_calls import Call, parser_for
from backend_engine.text.tool_formats import HERMES, LLAMA3, format_of_template

WEATHER = Call("weather", '{"city": "Köln", "days": [1, 2]}')
TIME = Call("time", "{}")
CASES: list[tuple[str, str, str, list[Call]]] = [
    (HERMES, "Hello, <b>world</b>!", "Hello, <b>world</b>!", []),
    (HERMES, '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": [1, 2]}}\n</tool_call>', "",
     [WEATHER]),
    (
        HERMES,
        'I look. <tool_call>{"name": "weather", "arguments": {"city": "Köln", "days": [1, 2]}}</tool_call>\n'
        '<tool_call>{"name": "time"}</tool_call>\n',
        "I look. ",
        [WEATHER, TIME],
    ),
    (HERMES, '<tool_call>{"name": "time", "arguments": {}}', "", [TIME]),
    (HERMES, "<tool_call>{broken</tool_call> so", "<tool_call>{broken</tool_call> so", []),
    (HERMES, '<tool_call>{"name": "time", "arg', '<tool_call>{"name": "time", "arg', []),
    (HERMES, "a <tool_ca", "a <tool_ca", []),
    (HERMES, '<tool_call>{"name": "time", "arguments": "{}"}</tool_call>', "", [TIME]),
    (HERMES, '<tool_call>{"name": "time", "arguments": 5}</tool_call>',
     '<tool_call>{"name": "time", "arguments": 5}</tool_call>', []),
    (LLAMA3, '{"name": "weather", "parameters": {"city": "Köln", "days": [1, 2]}}', "", [WEATHER]),
    (LLAMA3, '<|python_tag|>{"name": "time", "parameters": {}}; {"name": "time", "arguments": {}}', "", [TIME, TIME]),
    (LLAMA3, '{"name": "say", "parameters": {"text": "a; \\"}{"}}', "", [Call("say", '{"text": "a; \\"}{"}')]),
    (LLAMA3, "The time is 5.", "The time is 5.", []),
    (LLAMA3, '{"answer": 5}', '{"answer": 5}', []),
    (LLAMA3, "  ", "  ", []),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES)
@given(cuts=st.lists(st.integers(0, 200), max_size=12))
def test_an_answer_is_read_alike_however_it_is_cut(
    form: str, text: str, content: str, calls: list[Call], cuts: list[int]
) -> None:
    edges = sorted({0, len(text), *(at % (len(text) + 1) for at in cuts)})
    parser = parser_for(form)
    found = [parser.push(text[start:end]) for start, end in pairwise(edges)]
    found.append(parser.finish())
    assert "".join(part for part, _ in found) == content
    assert [call for _, more in found for call in more] == calls


def test_content_is_shown_at_once_and_only_what_may_begin_a_call_is_held() -> None:
    parser = parser_for(HERMES)
    assert [parser.push(piece)[0] for piece in ("I look", " <tool", " is>")] == ["I look", " ", "<tool is>"]


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{% if tools %}<tool_call>{{ tool_call.arguments | tojson }}</tool_call>{% endif %}", HERMES),
        ('{% if tools is not none %}{"name": , "parameters": }<|start_header_id|>ipython{% endif %}', LLAMA3),
        ("{% if tools %}<tool_call><function=name></function></tool_call>{% endif %}", None),
        ("{{ messages[0].content }}", None),
    ],
)
def test_the_form_is_read_off_the_template(template: str, form: str | None) -> None:
    assert format_of_template(template) == form
