"""Which bytes a token stands for, read off a tokenizer's decoder (the `tokenizers` library)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
_WORD_START = "\u2581"


class TokenBytes(dict[int, bytes]):
    """Token id to bytes, filled on first use; special tokens and unknown ids stand for nothing.

    `strip_start` is how many leading spaces of a whole text the decoder removes.
    """

    def __init__(self, tokenizer: Tokenizer, to_bytes: Callable[[str], bytes], strip_start: int = 0) -> None:
        super().__init__()
        self.strip_start = strip_start
        self._token_of = tokenizer.id_to_token
        self._to_bytes = to_bytes
        self._special = {id_ for id_, token in tokenizer.get_added_tokens_decoder().items() if token.special}

    def __missing__(self, token: int) -> bytes:
        name = None if token in self._special else self._token_of(token)
        self[token] = found = b"" if name is None else self._to_bytes(name)
        return found


def token_bytes(tokenizer: Tokenizer) -> TokenBytes | None:
    """The table of a byte-level or byte-fallback tokenizer; None for any other kind."""
    steps = _decoder_steps(tokenizer)
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return TokenBytes(tokenizer, _byte_level(_byte_of_character()))
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and _replaces_word_start(steps[0]):
        rest = steps[3:]
        if not rest:
            return TokenBytes(tokenizer, _byte_fallback)
        strip = rest[0]
        if kinds[3:] == ["Strip"] and strip["content"] == " " and not strip["stop"]:
            return TokenBytes(tokenizer, _byte_fallback, strip["start"])
    return None


def _decoder_steps(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    if tokenizer.decoder is None:
        return [{"type": "none"}]
    state: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())
    return state["decoders"] if state["type"] == "Sequence" else [state]


def _replaces_word_start(step: dict[str, Any]) -> bool:
    return bool(step["pattern"] == {"String": _WORD_START} and step["content"] == " ")


def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 characters stand for themselves, the other bytes for U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


def _byte_level(byte_of: dict[str, int]) -> Callable[[str], bytes]:
    def to_bytes(token: str) -> bytes:
        try:
            return bytes([byte_of[character] for character in token])
        except KeyError:  # an added token outside the alphabet stands for its own text
            return token.encode()

    return to_bytes


def _byte_fallback(token: str) -> bytes:
    """SentencePiece: `<0xE4>` is a byte, anything else its text with U+2581 for a space.

    A run of byte tokens that is not valid UTF-8 keeps its valid characters here, where the library's own one-shot
    decode would replace the whole run.
    """
    found = _BYTE_TOKEN.match(token)
    return bytes([int(found[1], 16)]) if found else token.replace(_WORD_START, " ").encode()
