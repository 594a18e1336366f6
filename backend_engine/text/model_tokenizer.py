"""A real model's tokenizer and chat template, loaded by transformers."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backend_engine.text.fast_tokenizer import FastTokenizer
from backend_engine.text.tokenizer import Messages, TextError
from backend_engine.text.tool_formats import format_of_template
from protocol.errors import ApiError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class ModelTokenizer(FastTokenizer):
    """The `tokenizers` library does the work; of transformers only the chat template is used, which unlike its
    encoding changes no shared state."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        super().__init__(tokenizer.backend_tokenizer)
        self._transformers = tokenizer

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

    @property
    def tool_format(self) -> str | None:
        """Of a model with several templates, of the one that is for tools."""
        template: Any = self._transformers.chat_template
        if isinstance(template, dict):
            template = template.get("tool_use") or template.get("default")
        return format_of_template(template) if isinstance(template, str) else None

    def warm_up(self) -> None:
        """Compiles the chat template now, so that the first request does not wait for it."""
        if self._transformers.chat_template:
            with contextlib.suppress(ApiError):
                self.encode_chat([{"role": "user", "content": "x"}])

    def encode_chat(
        self, messages: Messages, *, open_answer: bool = True, tools: Sequence[dict[str, Any]] = ()
    ) -> list[int]:
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
                list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=open_answer
            )
        except (TemplateError, TypeError) as error:  # a TypeError: the template joins what can't be joined
            raise ApiError(
                400,
                "invalid_request",
                f"The model's chat template refuses these messages: {error}",
                param="messages",
            ) from error
        return self.encode(str(text), special=False)
