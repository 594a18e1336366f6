"""Tokens to text and back with the `tokenizers` library alone: all that a detokenizer needs, in little memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from backend_engine.text.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from backend_engine.text.token_bytes import token_bytes

if TYPE_CHECKING:
    from llguidance import LLTokenizer
    from tokenizers import Tokenizer


class FastTokenizer:
    """Wraps a tokenizer of the `tokenizers` library, which lets go of the interpreter lock and may be shared by
    threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._table = token_bytes(self._tokenizer)
        self._special = {id_ for id_, token in tokenizer.get_added_tokens_decoder().items() if token.special}

    @classmethod
    def from_json(cls, data: str) -> FastTokenizer:
        """From `to_json` of another one, which may have been loaded in another way: its equal, whatever loaded it."""
        from tokenizers import Tokenizer

        return cls(Tokenizer.from_str(data))

    def to_json(self) -> str:
        return str(self._tokenizer.to_str())

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=special).ids)

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=not special))

    def token_names(self, tokens: Sequence[int]) -> list[str]:
        return [self._tokenizer.id_to_token(token) or "" for token in tokens]

    def token_data(self, token: int) -> bytes:
        if token in self._special:
            return str(self._tokenizer.id_to_token(token)).encode()
        return self._table[token] if self._table is not None else self.decode([token]).encode()

    def detokenizer(self) -> Detokenizer:
        if self._table is not None:
            return ByteDetokenizer(self._table, self._table.strip_start)
        return WindowDetokenizer(self.decode)

    def grammar_vocabulary(self, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
        from llguidance import LLTokenizer

        return LLTokenizer(self.to_json(), n_vocab=vocab_size, eos_token=list(eos_token_ids))
