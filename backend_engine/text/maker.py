"""Text for all answers at once: what the core said goes in, one message of text comes out."""

from __future__ import annotations

import logging

from backend_engine.core.messages import Output, Outputs
from backend_engine.text.answer_text import AnswerText
from backend_engine.text.grammar import Grammars
from backend_engine.text.tokenizer import TokenTexts
from backend_engine.text.wire import NextMask, Open, Text, Texts
from tracing.clock import Clock

log = logging.getLogger(__name__)


class TextMaker:
    """Keeps an AnswerText from its Open to the core's last word on it."""

    def __init__(self, tokenizer: TokenTexts, grammars: Grammars, clock: Clock) -> None:
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._clock = clock
        self._answers: dict[str, AnswerText] = {}

    @property
    def count(self) -> int:
        """Answers in the making."""
        return len(self._answers)

    def open(self, opened: Open) -> Texts | None:
        """An answer begins; its first mask, if it follows a grammar."""
        began_ns = self._clock.mono_ns()
        texts: list[Text] = []
        masks: list[NextMask] = []
        try:
            follower = None if opened.grammar is None else self._grammars.follow(opened.grammar)
            answer = self._answers[opened.request_id] = AnswerText(opened, self._tokenizer, follower)
            mask = answer.first_mask()
        except Exception:
            log.exception("the text of request %s can't be made", opened.request_id)
            texts.append(Text(opened.request_id, "", "error", 0, None))
        else:
            masks += [mask] if mask is not None else []
        if not texts and not masks:
            return None
        return Texts(texts, masks, self._clock.mono_ns() - began_ns, is_step=False)

    def take(self, outputs: Outputs) -> Texts:
        """One step's tokens. An answer that can't be made ends with an error; the others go on."""
        began_ns = self._clock.mono_ns()
        texts: list[Text] = []
        masks: list[NextMask] = []
        for output in outputs.outputs:
            answer = self._answers.get(output.request_id)
            if answer is None:
                continue
            try:
                self._take_one(answer, output, texts, masks)
            except Exception:
                log.exception("the text of request %s can't be made", output.request_id)
                answer.is_over = True
                texts.append(Text(output.request_id, "", "error", 0, None))
            if output.finished is not None:
                del self._answers[output.request_id]
        return Texts(texts, masks, self._clock.mono_ns() - began_ns, is_step=True)

    def _take_one(self, answer: AnswerText, output: Output, texts: list[Text], masks: list[NextMask]) -> None:
        text = answer.take(output)
        if text is not None:
            texts.append(text)
        if output.finished is None:
            mask = answer.next_mask(output)
            if isinstance(mask, NextMask):
                masks.append(mask)
            elif mask is not None:
                texts.append(mask)
