"""The simulated device's tokenizer: a token is a byte of UTF-8, so every length is known in advance."""

from __future__ import annotations

from collections.abc import Sequence

from backend_engine.text.detokenizer import ByteDetokenizer, Detokenizer
from backend_engine.text.tokenizer import Messages

EOS = 256
VOCAB_SIZE = 257

_TABLE = {token: bytes([token]) for token in range(256)} | {EOS: b""}


class ByteTokenizer:
    """Ids 0 to 255 are bytes, 256 ends a text."""

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return list(text.encode())

    def encode_chat(self, messages: Messages, *, open_answer: bool = True) -> list[int]:
        text = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
        return self.encode(text + "assistant: " if open_answer else text)

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        return b"".join([_TABLE[token] for token in tokens]).decode(errors="replace")

    def token_names(self, tokens: Sequence[int]) -> list[str]:
        return ["<eos>" if token == EOS else f"<0x{token:02X}>" for token in tokens]

    def detokenizer(self) -> Detokenizer:
        return ByteDetokenizer(_TABLE)
