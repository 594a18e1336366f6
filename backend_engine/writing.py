"""Writing one answer to its client, as a stream or whole, with the engine's timings in band."""

from __future__ import annotations

from backend_engine.answers import DONE, Answer, usage_of
from backend_engine.asgi import EVENT_STREAM, Header, Receive, Send, send_error, send_json
from backend_engine.generation import Generation
from backend_engine.record import RequestRecord, timings_of
from protocol import headers as names
from protocol.timings import HostIdentity, Timings
from tracing.clock import Clock


class AnswerWriter:
    """Reads a generation and writes its answer. The status line goes out with the first event, so that what fails
    before it is an ordinary HTTP error."""

    def __init__(
        self,
        generation: Generation,
        answer: Answer,
        send: Send,
        request_id: str,
        *,
        clock: Clock,
        host: HostIdentity,
        is_simulated: bool,
    ) -> None:
        self._generation = generation
        self._record: RequestRecord = generation.record
        self._answer = answer
        self._send = send
        self._request_id = request_id
        self._clock = clock
        self._host = host
        self._is_simulated = is_simulated
        self._has_begun = False

    async def write(self, receive: Receive, *, is_stream: bool, wants_usage: bool) -> None:
        """Until the answer is written, or the client is gone."""
        if is_stream:
            await self._write_stream(wants_usage=wants_usage)
        else:
            await self._write_whole()
        record = self._record
        if record.error is not None and record.left_ns is None:
            if self._has_begun:
                await self._send_part(record.error.openai_event(self._request_id), is_last=True)
            else:
                await send_error(self._send, receive, record.error, self._request_id)
        elif record.left_ns is None:
            record.last_written_ns = self._clock.mono_ns()

    # -- a stream ----------------------------------------------------------------------------------------------------

    async def _write_stream(self, *, wants_usage: bool) -> None:
        generation, record = self._generation, self._record
        while record.finish_reason is None and record.error is None:
            await generation.wait()
            if record.left_ns is not None:
                return
            pieces = generation.take_pieces()
            last = pieces.pop() if record.finish_reason is not None else None
            for piece in pieces:
                if self._has_begun:
                    await self._send_part(self._answer.event(piece))
                else:
                    self._stamp()
                    await self._begin(self._answer.event(piece, self._timings(is_last=False)))
            if last is not None:
                await self._end_stream(last, wants_usage=wants_usage)

    async def _begin(self, event: bytes, *, is_last: bool = False) -> None:
        self._has_begun = True
        headers: list[Header] = [*EVENT_STREAM, (names.REQUEST_ID.encode(), self._request_id.encode())]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send_part(event, is_last=is_last)

    async def _end_stream(self, last: str, *, wants_usage: bool) -> None:
        self._stamp()
        record = self._record
        events = [self._answer.last(last, record.finish_reason or "stop", self._timings(is_last=True))]
        if wants_usage:
            events.append(self._answer.usage(record.prompt_tokens or 0, record.output_tokens, record.cached_tokens))
        events.append(DONE)
        data = b"".join(events)
        if self._has_begun:
            await self._send_part(data, is_last=True)
        else:
            await self._begin(data, is_last=True)

    async def _send_part(self, data: bytes, *, is_last: bool = False) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": not is_last})

    # -- a whole answer ----------------------------------------------------------------------------------------------

    async def _write_whole(self) -> None:
        generation, record = self._generation, self._record
        await generation.wait_for_end()
        if record.finish_reason is None or record.left_ns is not None:
            return
        text = "".join(generation.take_pieces())
        self._stamp()
        usage = usage_of(record.prompt_tokens or 0, record.output_tokens, record.cached_tokens)
        body = self._answer.whole(text, record.finish_reason, usage, self._timings(is_last=True))
        headers: tuple[Header, ...] = ((names.REQUEST_ID.encode(), self._request_id.encode()),)
        await send_json(self._send, 200, body, headers)

    # -- timings -----------------------------------------------------------------------------------------------------

    def _stamp(self) -> None:
        """`first_written`: set once, just before the first event that holds text (or the only one, or the body)."""
        if self._record.first_written_ns is None:
            self._record.first_written_ns = self._clock.mono_ns()

    def _timings(self, *, is_last: bool) -> Timings:
        return timings_of(self._record, self._host, is_simulated=self._is_simulated, is_last=is_last)
