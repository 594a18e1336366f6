"""One answer in the making: tokens of the core go in, pieces of text come out."""

from __future__ import annotations

import asyncio

from backend_engine.core.messages import Output
from backend_engine.record import RequestRecord
from backend_engine.text.detokenizer import Detokenizer
from backend_engine.text.stops import StopFinder
from protocol.errors import ApiError

CORE_ERRORS = {
    "invalid_prompt": 400,
    "context_length_exceeded": 400,
    "queue_full": 429,
    "engine_out_of_memory": 503,
}
"""Error code of the core -> HTTP status; any other is 500."""


class Generation:
    """What one request waits for. Whoever writes the answer is its only reader.

    `pieces` holds a piece of text for each step that gave any; it is never longer than the answer has tokens.
    """

    __slots__ = ("_detokenizer", "_news", "_stop_ids", "_stops", "pieces", "record", "request_id")

    def __init__(
        self,
        request_id: str,
        record: RequestRecord,
        detokenizer: Detokenizer,
        stops: tuple[str, ...],
        stop_token_ids: tuple[int, ...],
    ) -> None:
        self.request_id = request_id
        self.record = record
        self.pieces: list[str] = []
        self._detokenizer = detokenizer
        self._stops = StopFinder(stops) if stops else None
        self._stop_ids = frozenset(stop_token_ids)
        self._news = asyncio.Event()

    @property
    def is_over(self) -> bool:
        """No more text will come: the answer ended, failed, or nobody waits for it."""
        record = self.record
        return record.finish_reason is not None or record.error is not None or record.left_ns is not None

    def take(self, output: Output) -> bool:
        """Takes one step's output. Returns True when a stop string ended the answer here, so the core must be told."""
        record = self.record
        finished = output.finished
        if output.scheduled is not None and record.scheduled is None:
            record.scheduled = output.scheduled
        if finished is not None:
            record.finished = finished
        if self.is_over:
            return False
        if finished is not None and finished.reason not in ("stop", "length"):
            code = finished.error_code or "engine_error"
            message = finished.error or f"The engine ended this request ({finished.reason})."
            self.fail(ApiError(CORE_ERRORS.get(code, 500), code, message))
            return False
        self._count(output)
        return self._add_text(output)

    def _count(self, output: Output) -> None:
        record = self.record
        record.output_tokens += len(output.tokens)
        if output.tokens:
            record.last_token_ns = output.step_end_ns
        if output.finished is not None:
            record.output_tokens = output.finished.output_tokens
            record.last_token_ns = output.finished.last_token_ns

    def _add_text(self, output: Output) -> bool:
        tokens = output.tokens
        finished = output.finished
        if finished is not None and tokens and tokens[-1] in self._stop_ids:
            tokens = tokens[:-1]  # it ended the answer and is no part of it
        text = self._detokenizer.push(tokens) if tokens else ""
        if finished is not None:
            text += self._detokenizer.finish()
        if self._stops is not None:
            text = self._stops.push(text)
            if self._stops.found:
                self._end(text, "stop")
                return finished is None
            if finished is not None:
                text += self._stops.finish()
        if finished is not None:
            self._end(text, "length" if finished.reason == "length" else "stop")
        elif text:
            self.pieces.append(text)
            self._news.set()
        return False

    def _end(self, text: str, reason: str) -> None:
        self.pieces.append(text)
        self.record.finish_reason = "length" if reason == "length" else "stop"
        self._news.set()

    def fail(self, error: ApiError) -> None:
        """The answer can't be had; the reader is told once it has what came before."""
        if not self.is_over:
            self.record.error = error
            self._news.set()

    def leave(self, now_ns: int) -> None:
        """The client is gone."""
        if self.record.left_ns is None and self.record.ended_ns is None:
            self.record.left_ns = now_ns
            self._news.set()

    async def wait(self) -> None:
        """Until there is text or an end that the reader has not seen."""
        await self._news.wait()
        self._news.clear()

    async def wait_for_end(self) -> None:
        """Until no more text will come."""
        while not self.is_over:
            await self.wait()

    def take_pieces(self) -> list[str]:
        """The pieces since the last call. If `is_over` with a finish reason, the last one ends the answer."""
        pieces, self.pieces = self.pieces, []
        return pieces
