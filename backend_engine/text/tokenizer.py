"""What the frontend asks of a tokenizer, and which one serves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from backend_engine.text.detokenizer import Detokenizer
from settings.schema import Settings

if TYPE_CHECKING:
    from llguidance import LLTokenizer

Messages = Sequence[dict[str, Any]]
"""Chat messages as templates take them: `role` and `content`; with tools, `tool_calls` and `tool_call_id` too."""


class TextError(Exception):
    """The tokenizer can't be used; the message names the cause and the fix."""


class TokenTexts(Protocol):
    """Tokens to text: all that an answer needs."""

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """One-shot decode; with `special`, special tokens are shown."""

    def token_data(self, token: int) -> bytes:
        """What one token alone stands for; a special token stands for its name."""

    def detokenizer(self) -> Detokenizer:
        """A new answer's text."""

    def grammar_vocabulary(self, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
        """For grammars; takes a second for a large vocabulary."""


class Tokenizer(TokenTexts, Protocol):
    """Text to tokens and back. Safe to use from several threads at once."""

    @property
    def tool_format(self) -> str | None:
        """How the model writes tool calls; None: its chat template has no tools, or none that we can read."""

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a text; with `special`, what the model puts around one (a BOS token)."""

    def encode_chat(
        self, messages: Messages, *, open_answer: bool = True, tools: Sequence[dict[str, Any]] = ()
    ) -> list[int]:
        """Token ids of a conversation; with `open_answer`, up to where the assistant's answer begins.

        Raises ApiError 400 where the model has no chat template or its template refuses the conversation.
        """

    def token_names(self, tokens: Sequence[int]) -> list[str]:
        """Each token as the vocabulary writes it."""

    def to_json(self) -> str:
        """For `token_texts_from`, in another process; empty for the simulated device's."""


def prepare_tokenizer(settings: Settings) -> None:
    """Imports what `load_tokenizer` will need: seconds of work that can be done while the core loads the model."""
    if settings.engine.device != "simulated":
        from transformers import AutoTokenizer  # noqa: F401


def load_tokenizer(settings: Settings) -> Tokenizer:
    """The tokenizer that belongs to the configured model. Raises TextError. May take seconds."""
    if settings.engine.device == "simulated":
        from backend_engine.text.byte_tokenizer import ByteTokenizer

        return ByteTokenizer()
    from backend_engine.models.errors import ModelError
    from backend_engine.models.resolve import resolve_model
    from backend_engine.text.model_tokenizer import ModelTokenizer

    try:
        folder = resolve_model(settings.engine.model).folder
    except ModelError as error:
        raise TextError(str(error)) from error
    return ModelTokenizer.load(folder)


def token_texts_from(data: str) -> TokenTexts:
    """A tokenizer's other half, from its `to_json`; needs no transformers."""
    if not data:
        from backend_engine.text.byte_tokenizer import ByteTokenizer

        return ByteTokenizer()
    from backend_engine.text.fast_tokenizer import FastTokenizer

    return FastTokenizer.from_json(data)
