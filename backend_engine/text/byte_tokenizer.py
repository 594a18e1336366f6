"""The simulated device's tokenizer: a token is a byte of UTF-8, so every length is known in advance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from backend_engine.text.detokenizer import ByteDetokenizer, Detokenizer
from backend_engine.text.tokenizer import Messages

if TYPE_CHECKING:
    from llguidance import LLTokenizer

EOS = 256
VOCAB_SIZE = 257

_TABLE = {token: bytes([token]) for token in range(256)} | {EOS: b""}


class ByteTokenizer:
    """Ids 0 to 255 are bytes, 256 ends a text."""

    tool_format: str | None = None

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return list(text.encode())

    def encode_chat(
        self, messages: Messages, *, open_answer: bool = True, tools: Sequence[dict[str, Any]] = ()
    ) -> list[int]:
        text = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
        return self.encode(text + "assistant: " if open_answer else text)

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        return b"".join([_TABLE[token] for token in tokens]).decode(errors="replace")

    def token_names(self, tokens: Sequence[int]) -> list[str]:
        return ["<eos>" if token == EOS else f"<0x{token:02X}>" for token in tokens]

    def token_data(self, token: int) -> bytes:
        return _TABLE[token] or b"<eos>"

    def to_json(self) -> str:
        return ""

    def detokenizer(self) -> Detokenizer:
        return ByteDetokenizer(_TABLE)

    def grammar_vocabulary(self, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
        from llguidance import LLTokenizer, TokenizerWrapper

        return LLTokenizer(TokenizerWrapper(_Bytes()), n_vocab=vocab_size, eos_token=list(eos_token_ids))


class _Bytes:
    """The vocabulary in the form that llguidance reads."""

    eos_token_id = EOS
    bos_token_id = None
    tokens = tuple(_TABLE[token] or b"<eos>" for token in range(VOCAB_SIZE))
    special_token_ids = (EOS,)

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)
