"""Log probabilities in words: each sampled token waits for its text to be shown."""

from __future__ import annotations

from collections import deque

from backend_engine.core.messages import TokenLogprobs
from backend_engine.text.tokenizer import TokenTexts
from backend_engine.text.wire import SampledText, TokenText

LEAST_LOGPROB = -9999.0
"""In place of minus infinity, which JSON does not have; OpenAI's own stand-in."""


class LogprobQueue:
    """The sampled tokens of one answer that are not shown yet. A token is shown with the first character of its text,
    or, if it has none of its own (the first bytes of a character), with the character that it opens."""

    def __init__(self, tokenizer: TokenTexts) -> None:
        self._tokenizer = tokenizer
        self._waiting: deque[SampledText] = deque()

    def push(self, token: int, found: TokenLogprobs, offset: int) -> None:
        """A token whose text begins at `offset`."""
        top = zip(found.top_ids, found.top_logprobs, strict=True)
        self._waiting.append(
            SampledText(self._word(token, found.logprob), tuple(self._word(id_, value) for id_, value in top), offset)
        )

    def _word(self, token: int, logprob: float) -> TokenText:
        data = self._tokenizer.token_data(token)
        return TokenText(data.decode(errors="replace"), data, max(logprob, LEAST_LOGPROB))

    def take(self, shown: int | None) -> list[SampledText]:
        """Those that begin before character `shown`; None: all that are left."""
        found = []
        while self._waiting and (shown is None or self._waiting[0].offset < shown):
            found.append(self._waiting.popleft())
        return found
