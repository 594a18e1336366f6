"""A real model's tokenizer and chat template, loaded by transformers."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from backend_engine.text.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from backend_engine.text.token_bytes import token_bytes
from backend_engine.text.tokenizer import Messages, TextError
from protocol.errors import ApiError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class ModelTokenizer:
    """Wraps a tokenizer of the `tokenizers` library.

    Encoding and decoding go to that library directly: it lets go of the interpreter lock, and unlike transformers'
    call it changes no shared state, so that threads may share it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._transformers = tokenizer
        self._tokenizer = tokenizer.backend_tokenizer
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._table = token_bytes(self._tokenizer)

    @classmethod
    def load(cls, folder: Path | str) -> ModelTokenizer:
        """From a folder with tokenizer files. Raises TextError."""
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(str(folder))
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise TextError(f"The tokenizer of the model in {folder} can't be loaded: {error}") from error
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise TextError(
                f"The tokenizer in {folder} is a {type(tokenizer).__name__}, which has no fast form (tokenizer.json). "
                "Convert it with transformers, or serve the model with vLLM as an upstream."
            )
        loaded = cls(tokenizer)
        loaded.warm_up()
        return loaded

    def warm_up(self) -> None:
        """Compiles the chat template now, so that the first request does not wait for it."""
        if self._transformers.chat_template:
            with contextlib.suppress(ApiError):
                self.encode_chat([{"role": "user", "content": "x"}])

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=special).ids)

    def encode_chat(self, messages: Messages, *, open_answer: bool = True) -> list[int]:
        if not self._transformers.chat_template:
            raise ApiError(
                400,
                "chat_template_missing",
                "This model has no chat template, so it can't take 'messages'. Use /v1/completions with a 'prompt', "
                "or serve an instruction-tuned model.",
                param="messages",
            )
        from jinja2 import TemplateError

        try:
            text = self._transformers.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=open_answer
            )
        except TemplateError as error:
            raise ApiError(
                400,
                "invalid_request",
                f"The model's chat template refuses these messages: {error}",
                param="messages",
            ) from error
        return self.encode(str(text), special=False)

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=not special))

    def token_names(self, tokens: Sequence[int]) -> list[str]:
        return [self._tokenizer.id_to_token(token) or "" for token in tokens]

    def detokenizer(self) -> Detokenizer:
        if self._table is not None:
            return ByteDetokenizer(self._table, self._table.strip_start)
        return WindowDetokenizer(self.decode)
