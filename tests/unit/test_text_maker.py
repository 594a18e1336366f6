"""Text of many answers at once: pieces, ends, log probabilities and masks, from what the core says."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend_engine.core.messages import Finished, Gauges, Output, Outputs, TokenLogprobs
from backend_engine.text.byte_tokenizer import EOS, VOCAB_SIZE, ByteTokenizer
from backend_engine.text.grammar import Grammars, call_grammar, check_grammar, json_grammar
from backend_engine.text.maker import TextMaker
from backend_engine.text.wire import Open, SampledText, Text, Texts
from protocol.errors import ApiError
from tracing.clock import FakeClock

GAUGES = Gauges(0, 0, 0, 1)
SCRIPTS = st.text(alphabet=st.sampled_from("漢字かなภาषาதमि👩\u200d👧🏽🇫🇷e\u0301\u0308 \nabcß"), max_size=20)


def maker() -> TextMaker:
    return TextMaker(ByteTokenizer(), Grammars(ByteTokenizer(), VOCAB_SIZE, (EOS,)), FakeClock())


def finished(reason: str, tokens: int) -> Finished:
    return Finished(reason, 7, 8, tokens, 0, 0, 0)


def steps(name: str, tokens: list[int], reason: str = "length", **fields: Any) -> list[Output]:
    """One token a step, the last with the core's last word."""
    outputs = [Output(name, [token], 100 + at) for at, token in enumerate(tokens)]
    if fields.get("logprobs"):
        found = [[TokenLogprobs(-0.5 * at, (token, EOS), (-0.5 * at, -9.0))] for at, token in enumerate(tokens)]
        outputs = [msgspec.structs.replace(one, logprobs=more) for one, more in zip(outputs, found, strict=True)]
    outputs[-1] = msgspec.structs.replace(outputs[-1], finished=finished(reason, len(tokens)))
    return outputs


def take(maker: TextMaker, output: Output) -> Texts:
    return maker.take(Outputs([output], [], GAUGES))


def texts(maker: TextMaker, outputs: list[Output]) -> list[Text]:
    return [text for output in outputs for text in take(maker, output).texts]


@given(text=SCRIPTS)
def test_one_token_at_a_time_nothing_is_replaced_doubled_or_lost(text: str) -> None:
    making = maker()
    making.open(Open("a"))
    found = texts(making, steps("a", list((text + "!").encode())))
    assert "".join(one.text for one in found) == text + "!"
    assert not any("\ufffd" in one.text for one in found)
    assert [one.end for one in found] == [None] * (len(found) - 1) + ["length"]
    assert making.count == 0


def test_a_stop_string_ends_the_answer_with_the_tokens_counted_up_to_there() -> None:
    making = maker()
    making.open(Open("a", stops=("END",)))
    found = texts(making, [Output("a", [letter], 100 + at) for at, letter in enumerate(b"xEND and more")])
    assert [(one.text, one.end) for one in found] == [("x", None), ("", "stop")]
    assert (found[-1].output_tokens, found[-1].last_token_ns) == (4, 103)
    assert making.count == 1
    take(making, Output("a", [], 300, None, finished("abort", 13)))
    assert making.count == 0


def test_what_the_core_failed_ends_after_what_came_before() -> None:
    making = maker()
    making.open(Open("a"))
    found = texts(making, [Output("a", [65], 1), Output("a", [], 2, None, finished("error", 1))])
    assert [(one.text, one.end) for one in found] == [("A", None), ("", "error")]


def test_one_answer_that_cannot_be_made_leaves_the_others_alone() -> None:
    making = maker()
    making.open(Open("bad"))
    making.open(Open("good"))
    said = making.take(Outputs([Output("bad", [9999], 1), Output("good", [65], 1)], [], GAUGES))
    assert [(one.request_id, one.text, one.end) for one in said.texts] == [("bad", "", "error"), ("good", "A", None)]
    assert [one.text for one in texts(making, [Output("bad", [66], 2), Output("good", [66], 2)])] == ["B"]


# -- log probabilities -------------------------------------------------------------------------------------------------


def logprobs(found: list[Text]) -> list[SampledText]:
    return [one for text in found for one in text.logprobs or ()]


def test_each_token_comes_with_the_text_that_it_opens() -> None:
    making = maker()
    making.open(Open("a", wants_logprobs=True))
    found = texts(making, steps("a", list("é!".encode()), logprobs=True))
    assert [(one.text, [each.offset for each in one.logprobs or ()]) for one in found] == [("é", [0, 0]), ("!", [1])]
    first, second, third = logprobs(found)
    assert (first.token.text, first.token.data, first.token.logprob) == ("\ufffd", b"\xc3", 0.0)
    assert (second.token.data, third.token.text) == (b"\xa9", "!")
    assert [(other.text, other.logprob) for other in third.top] == [("!", -1.0), ("<eos>", -9.0)]


def test_what_the_model_rules_out_is_still_a_number() -> None:
    making = maker()
    making.open(Open("a", wants_logprobs=True))
    found = [TokenLogprobs(-1.0, (65, 66), (-1.0, float("-inf")))]
    (text,) = texts(making, [Output("a", [65], 1, logprobs=found)])
    assert [top.logprob for top in (text.logprobs or ())[0].top] == [-1.0, -9999.0]


@given(text=SCRIPTS, stop=st.sampled_from(["", "a", "漢", "ab", "👩"]))
def test_their_bytes_put_together_are_the_text(text: str, stop: str) -> None:
    making = maker()
    making.open(Open("a", stops=(stop,) if stop else (), wants_logprobs=True, stop_token_ids=(EOS,)))
    found = texts(making, steps("a", [*text.encode(), EOS], "stop", logprobs=True))
    shown = "".join(one.text for one in found)
    assert shown == (text.partition(stop)[0] if stop else text)
    assert b"".join(one.token.data for one in logprobs(found)).decode() == shown
    offset = 0
    for one in found:
        assert all(each.offset < offset + len(one.text) for each in one.logprobs or ())
        offset += len(one.text)


# -- grammars ----------------------------------------------------------------------------------------------------------

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"$ref": "#/$defs/age"}},
    "required": ["name", "age"],
    "additionalProperties": False,
    "$defs": {"age": {"type": "integer", "minimum": 0}},
}


def allowed(mask: bytes) -> set[int]:
    assert len(mask) == 4 * -(-VOCAB_SIZE // 32)
    return {token for token in range(VOCAB_SIZE) if mask[token // 8] >> token % 8 & 1}


def follow(grammar: str, choose: Any, limit: int = 400) -> tuple[str, str | None]:
    """Plays a core that samples what `choose` picks from the mask; the answer and why it ended."""
    making = maker()
    opened = making.open(Open("a", stop_token_ids=(EOS,), grammar=grammar))
    assert opened is not None
    assert [(mask.request_id, mask.output) for mask in opened.masks] == [("a", 0)]
    mask, text = opened.masks[0].allowed, ""
    for at in range(limit):
        token = choose(text, allowed(mask))
        is_last = token == EOS
        said = take(making, Output("a", [token], at, None, finished("stop", at + 1) if is_last else None))
        text += "".join(one.text for one in said.texts)
        if is_last or (said.texts and said.texts[-1].end is not None):
            return text, said.texts[-1].end
        (following,) = said.masks
        assert following.output == at + 1
        mask = following.allowed
    return text, None


@given(random=st.randoms(use_true_random=False))
def test_whatever_is_sampled_under_the_masks_follows_the_schema(random: Any) -> None:
    letters = set(b'{}[]":,.0123456789nameage x') | {EOS}
    text, end = follow(json_grammar(PERSON), lambda _, mask: random.choice(sorted(mask & letters or mask)))
    if end is not None:
        person = json.loads(text)
        assert set(person) == {"name", "age"}
        assert person["age"] >= 0
    else:
        assert text.startswith("{")


def test_a_json_object_is_any_object_and_nothing_else() -> None:
    making = maker()
    opened = making.open(Open("a", grammar=json_grammar(None)))
    assert opened is not None
    assert allowed(opened.masks[0].allowed) == {ord("{")}
    text, end = follow(json_grammar(None), lambda text, mask: ([*b'{"a": [1, {}]}', EOS])[len(text)])
    assert (json.loads(text), end) == ({"a": [1, {}]}, "stop")


def test_once_the_grammar_is_complete_only_the_end_is_allowed() -> None:
    making = maker()
    making.open(Open("a", grammar=json_grammar({"enum": [7]})))
    (mask,) = take(making, Output("a", [ord("7")], 1)).masks
    assert allowed(mask.allowed) == {EOS}


def test_a_token_against_the_mask_ends_the_answer_with_an_error() -> None:
    text, end = follow(json_grammar({"enum": [7]}), lambda *_: ord("8"))
    assert (text, end) == ("8", "error")


def test_a_forced_call_keeps_the_references_of_each_schema() -> None:
    grammar = call_grammar(
        "<tool_call>\n", "arguments", {"greet": PERSON, "stop": {"type": "object"}}, "\n</tool_call>"
    )
    wanted = '<tool_call>\n{"name": "greet", "arguments": {"name": "Ada", "age": 36}}\n</tool_call>'
    tokens = [*wanted.encode(), EOS]

    def choose(text: str, mask: set[int]) -> int:
        assert tokens[len(text)] in mask
        return tokens[len(text)]

    assert follow(grammar, choose) == (wanted, "stop")


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"type": "objekt"}, "objekt"),
        ({"type": "string", "pattern": "("}, "unclosed group"),
        ({"$ref": "https://example.org/schema"}, "example.org"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused_with_the_reason(schema: dict[str, Any], why: str) -> None:
    for grammar in (json_grammar(schema), call_grammar("", "arguments", {"f": schema}, "")):
        with pytest.raises(ApiError, match=why) as refusal:
            check_grammar(grammar)
        assert refusal.value.status == 400
