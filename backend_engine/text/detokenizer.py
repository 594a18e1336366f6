"""Tokens to text, a few at a time: what was given out is never taken back, and never ends inside a character."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """The text of one answer. The pieces put together are the one-shot decode of all its tokens."""

    def push(self, tokens: Sequence[int]) -> str:
        """The text that these tokens complete; empty while a character is still open."""

    def finish(self) -> str:
        """What was held back; nothing follows."""


class ByteDetokenizer:
    """For tokenizers whose tokens stand for bytes: constant work per token, exact.

    `table` maps a token id to its bytes. A character that is cut over tokens is held back until its last byte is here;
    bytes that can't be part of one become U+FFFD, one for each maximal subpart, as in a one-shot decode (Unicode 16,
    section 3.9). `strip_start` spaces are left out at the very beginning.
    """

    __slots__ = ("_decode", "_strip", "_table")

    def __init__(self, table: dict[int, bytes], strip_start: int = 0) -> None:
        self._table = table
        self._strip = strip_start
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, tokens: Sequence[int]) -> str:
        data = self._table[tokens[0]] if len(tokens) == 1 else b"".join([self._table[token] for token in tokens])
        text = self._decode(data)
        return self._stripped(text) if self._strip and text else text

    def finish(self) -> str:
        text = self._decode(b"", True)
        return self._stripped(text) if self._strip and text else text

    def _stripped(self, text: str) -> str:
        while self._strip and text:
            if text[0] != " ":
                self._strip = 0
                break
            text = text[1:]
            self._strip -= 1
        return text


class WindowDetokenizer:
    """For every other tokenizer: decodes a short window of tokens twice, without and with the new ones.

    The window starts at the tokens of the piece before, so that whatever a decoder does to the start of a text happens
    in both and cancels out. Text that ends in U+FFFD may be an open character and is held back.
    """

    __slots__ = ("_decode", "_given", "_given_text", "_held")

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._given: list[int] = []
        self._given_text = ""
        self._held: list[int] = []

    def push(self, tokens: Sequence[int]) -> str:
        self._held.extend(tokens)
        text = self._decode(self._given + self._held)
        if text.endswith(REPLACEMENT) or len(text) <= len(self._given_text):
            return ""
        piece = text[len(self._given_text) :]
        self._given, self._held = self._held, []
        self._given_text = self._decode(self._given)
        return piece

    def finish(self) -> str:
        return self._decode(self._given + self._held)[len(self._given_text) :]
