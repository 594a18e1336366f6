"""The answers to one request in the making: what the core and the text processes say of them goes in, pieces come
out."""

from __future__ import annotations

import asyncio
from typing import Any

from backend_engine.core.messages import Finished, Scheduled
from backend_engine.record import RequestRecord
from backend_engine.text.wire import Text
from protocol.errors import ApiError

CORE_ERRORS = {
    "invalid_prompt": 400,
    "context_length_exceeded": 400,
    "queue_full": 429,
    "engine_out_of_memory": 503,
}
"""Error code of the core -> HTTP status; any other is 500."""


class Choice:
    """One of the `n` answers: one request of the core."""

    __slots__ = ("end", "finished", "generation", "index", "last_step_ns", "output_tokens", "request_id")

    def __init__(self, generation: Generation, index: int, request_id: str) -> None:
        self.generation = generation
        self.index = index
        self.request_id = request_id
        self.last_step_ns: int | None = None
        """End of the last step that sampled a token of it."""
        self.output_tokens = 0
        self.end: str | None = None
        """Why its text ended."""
        self.finished: Finished | None = None
        """The core's own account of its end."""


class Generation:
    """What one request waits for. Whoever writes the answer is its only reader.

    `pieces` holds a piece of text for each step of each choice that gave any; it is never longer than the answers have
    tokens.
    """

    __slots__ = ("_news", "_open", "choices", "pieces", "record")

    def __init__(self, record: RequestRecord, request_ids: list[str]) -> None:
        self.record = record
        self.pieces: list[tuple[int, Text]] = []
        self.choices = [Choice(self, index, request_id) for index, request_id in enumerate(request_ids)]
        self._open = len(self.choices)
        self._news = asyncio.Event()

    @property
    def is_over(self) -> bool:
        """No more text will come: every answer ended, or it failed, or nobody waits for it."""
        record = self.record
        return record.finish_reason is not None or record.error is not None or record.left_ns is not None

    # -- the core ----------------------------------------------------------------------------------------------------

    def schedule(self, scheduled: Scheduled) -> bool:
        """A choice has its first token. True for the first choice of all, from which the request's marks are taken."""
        if self.record.scheduled is not None:
            return False
        self.record.scheduled = scheduled
        return True

    def finish(self, choice: Choice, finished: Finished) -> None:
        """The core's last word on a choice; after the last choice's, the record has the request's."""
        choice.finished = finished
        found = [one.finished for one in self.choices if one.finished is not None]
        if len(found) == len(self.choices):
            self.record.finished = together(found)

    @property
    def unfinished(self) -> list[Choice]:
        """Those that the core still has."""
        return [choice for choice in self.choices if choice.finished is None]

    # -- text --------------------------------------------------------------------------------------------------------

    def take(self, choice: Choice, text: Text) -> bool:
        """Takes new text of a choice. True when the core must be told to end it, or, after an error, all that it still
        has."""
        if self.is_over or choice.end is not None:
            return False
        record, finished = self.record, choice.finished
        record.output_tokens += text.output_tokens - choice.output_tokens
        choice.output_tokens = text.output_tokens
        if text.last_token_ns is not None:
            record.last_token_ns = max(text.last_token_ns, record.last_token_ns or 0)
        if text.end == "error":
            self.fail(_failure(finished))
            return bool(self.unfinished)
        if text.end is not None:
            choice.end = text.end
            self._open -= 1
            if self._open == 0:
                record.finish_reasons = tuple(str(one.end) for one in self.choices)
                record.finish_reason = text.end
        self.pieces.append((choice.index, text))
        self._news.set()
        return text.end is not None and finished is None

    def fail(self, error: ApiError) -> None:
        """The answers can't be had; the reader is told once it has what came before."""
        if not self.is_over:
            self.record.error = error
            self._news.set()

    def leave(self, now_ns: int) -> None:
        """The client is gone."""
        if self.record.left_ns is None and self.record.ended_ns is None:
            self.record.left_ns = now_ns
            self._news.set()

    # -- the reader --------------------------------------------------------------------------------------------------

    async def wait(self) -> None:
        """Until there is text or an end that the reader has not seen."""
        await self._news.wait()
        self._news.clear()

    async def wait_for_end(self) -> None:
        """Until no more text will come."""
        while not self.is_over:
            await self.wait()

    def take_pieces(self) -> list[tuple[int, Text]]:
        """The pieces since the last call, each with its choice's index."""
        pieces, self.pieces = self.pieces, []
        return pieces


def _failure(finished: Finished | None) -> ApiError:
    if finished is None:
        return ApiError(500, "engine_error", "The text of this answer could not be made; the engine's log says why.")
    code = finished.error_code or "engine_error"
    message = finished.error or f"The engine ended this request ({finished.reason})."
    return ApiError(CORE_ERRORS.get(code, 500), code, message)


def together(found: list[Finished]) -> Finished:
    """One account of several choices: tokens and what was lost added up; steps and gaps of the one with most steps,
    since the choices ran in the same ones; of the ends the last."""
    if len(found) == 1:
        return found[0]
    longest = max(found, key=lambda one: one.steps)
    last = max(found, key=lambda one: one.ended_ns)
    failed = next((one for one in found if one.error_code is not None), None)
    aborted = next((one for one in found if one.reason == "abort"), None)
    told = failed or aborted or last

    def known(name: str) -> list[Any]:
        return [value for one in found if (value := getattr(one, name)) is not None]

    return Finished(
        reason=told.reason,
        last_token_ns=max(known("last_token_ns"), default=None),
        ended_ns=last.ended_ns,
        output_tokens=sum(known("output_tokens")),
        steps=longest.steps,
        batch_sum=longest.batch_sum,
        gap_ns=longest.gap_ns,
        wasted_tokens=sum(known("wasted_tokens")),
        preemptions=sum(known("preemptions")),
        preempted_ns=max(known("preempted_ns")),
        preempted_at_ns=tuple(sorted(instant for one in found for instant in one.preempted_at_ns)),
        error=told.error,
        error_code=told.error_code,
        scheduled_ns=min(known("scheduled_ns"), default=None),
    )
