"""The text of one answer: tokens of the core go in, pieces of text come out, up to a stop string or the core's end."""

from __future__ import annotations

from collections.abc import Sequence

from backend_engine.core.messages import Output, TokenLogprobs
from backend_engine.text.grammar import Follower
from backend_engine.text.logprobs import LogprobQueue
from backend_engine.text.stops import StopFinder
from backend_engine.text.tokenizer import TokenTexts
from backend_engine.text.wire import End, NextMask, Open, SampledText, Text


class AnswerText:
    """State of one answer; `is_over` once its text has ended, though the core may still be at it."""

    __slots__ = (
        "_decoded",
        "_detokenizer",
        "_follower",
        "_id",
        "_last_token_ns",
        "_logprobs",
        "_output_tokens",
        "_shown",
        "_stop_ids",
        "_stops",
        "is_over",
    )

    def __init__(self, opened: Open, tokenizer: TokenTexts, follower: Follower | None) -> None:
        self._id = opened.request_id
        self._detokenizer = tokenizer.detokenizer()
        self._stops = StopFinder(opened.stops) if opened.stops else None
        self._stop_ids = frozenset(opened.stop_token_ids)
        self._logprobs = LogprobQueue(tokenizer) if opened.wants_logprobs else None
        self._follower = follower
        self._output_tokens = 0
        self._last_token_ns: int | None = None
        self._decoded = 0
        """Characters that the detokenizer gave."""
        self._shown = 0
        self.is_over = False

    def take(self, output: Output) -> Text | None:
        """One step's tokens; None when they show nothing yet."""
        if self.is_over:
            return None
        finished = output.finished
        self._count(output)
        if finished is not None and finished.reason not in ("stop", "length"):
            return self._text("", "error", [])
        tokens = output.tokens
        if finished is not None and tokens and tokens[-1] in self._stop_ids:
            tokens = tokens[:-1]  # it ended the answer and is no part of it
        text = self._decode(tokens, output.logprobs or ())
        if finished is not None:
            text += self._detokenizer.finish()
        end: End | None = None if finished is None else "length" if finished.reason == "length" else "stop"
        if self._stops is not None:
            text = self._stops.push(text)
            if self._stops.found:
                end = "stop"
            elif finished is not None:
                text += self._stops.finish()
        if not text and end is None:
            return None
        return self._text(text, end, self._shown_logprobs(len(text), end))

    def _count(self, output: Output) -> None:
        self._output_tokens += len(output.tokens)
        if output.tokens:
            self._last_token_ns = output.step_end_ns
        if output.finished is not None:
            self._output_tokens = output.finished.output_tokens
            self._last_token_ns = output.finished.last_token_ns

    def _decode(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> str:
        if self._logprobs is None:
            return self._detokenizer.push(tokens) if tokens else ""
        text = ""
        for token, found in zip(tokens, logprobs, strict=False):
            self._logprobs.push(token, found, self._decoded)
            piece = self._detokenizer.push([token])
            self._decoded += len(piece)
            text += piece
        return text

    def _shown_logprobs(self, added: int, end: End | None) -> list[SampledText]:
        self._shown += added
        if self._logprobs is None:
            return []
        is_whole = end is not None and not (self._stops is not None and self._stops.found)
        return self._logprobs.take(None if is_whole else self._shown)

    def _text(self, text: str, end: End | None, logprobs: list[SampledText]) -> Text:
        self.is_over = end is not None
        return Text(self._id, text, end, self._output_tokens, self._last_token_ns, logprobs or None)

    # -- a grammar ---------------------------------------------------------------------------------------------------

    def first_mask(self) -> NextMask | None:
        """For output 0; None without a grammar."""
        return None if self._follower is None else NextMask(self._id, 0, self._follower.mask())

    def next_mask(self, output: Output) -> NextMask | Text | None:
        """After a step's tokens; a Text that ends the answer when they break the grammar."""
        if self._follower is None or self.is_over or not output.tokens:
            return None
        for token in output.tokens:
            self._follower.push(token)
        if self._follower.error is not None:
            return self._text("", "error", [])
        return NextMask(self._id, self._output_tokens, self._follower.mask())
