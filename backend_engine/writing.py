"""Writing one answer to its client, as a stream or whole, with the engine's timings in band."""

from __future__ import annotations

from backend_engine.answers import DONE, Answer, Part, usage_of
from backend_engine.asgi import EVENT_STREAM, Header, Receive, Send, send_error, send_json
from backend_engine.generation import Generation
from backend_engine.record import RequestRecord, timings_of
from backend_engine.text.tool_calls import Call, CallParser
from backend_engine.text.wire import SampledText, Text
from protocol import headers as names
from protocol.timings import HostIdentity, Timings
from tracing.clock import Clock


class AnswerWriter:
    """Reads a generation and writes its answer. The status line goes out with the first event, so that what fails
    before it is an ordinary HTTP error.

    `parsers`: one for each choice where tools may be called, else none.
    """

    def __init__(
        self,
        generation: Generation,
        answer: Answer,
        parsers: list[CallParser],
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
        self._parsers = parsers
        self._has_called = [False] * len(generation.choices)
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
        is_whole = False
        while not is_whole and record.error is None:
            await generation.wait()
            if record.left_ns is not None:
                return
            pieces = generation.take_pieces()
            is_whole = record.finish_reason is not None
            for at, (index, text) in enumerate(pieces):
                part = self._part(index, text)
                if part is None:
                    continue
                self._stamp()
                if is_whole and at == len(pieces) - 1:
                    await self._end_stream(part, wants_usage=wants_usage)
                else:
                    timings = None if self._has_begun else self._timings(is_last=False)
                    await self._send_part(self._answer.event(part, timings))

    def _part(self, index: int, text: Text) -> Part | None:
        """None where all that came may be the beginning of a call."""
        if not self._parsers:
            return Part(index, text.text, text.logprobs, (), text.end)
        content, calls = self._parsed(index, text.text, is_last=text.end is not None)
        if not content and not calls and text.end is None:
            return None
        return Part(index, content, None, tuple(calls), self._reason(index, text.end))

    def _parsed(self, index: int, text: str, *, is_last: bool) -> tuple[str, list[Call]]:
        content, calls = self._parsers[index].push(text)
        if is_last:
            rest, more = self._parsers[index].finish()
            content, calls = content + rest, calls + more
        self._has_called[index] = self._has_called[index] or bool(calls)
        return content, calls

    def _reason(self, index: int, end: str | None) -> str | None:
        """An answer that called a tool and then stopped, stopped for the tool."""
        return "tool_calls" if end == "stop" and self._has_called[index] else end

    async def _end_stream(self, last: Part, *, wants_usage: bool) -> None:
        record = self._record
        events = [self._answer.event(last, self._timings(is_last=True))]
        if wants_usage:
            events.append(self._answer.usage(record.prompt_tokens or 0, record.output_tokens, record.cached_tokens))
        events.append(DONE)
        await self._send_part(b"".join(events), is_last=True)

    async def _send_part(self, data: bytes, *, is_last: bool = False) -> None:
        if not self._has_begun:
            self._has_begun = True
            headers: list[Header] = [*EVENT_STREAM, (names.REQUEST_ID.encode(), self._request_id.encode())]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": data, "more_body": not is_last})

    # -- a whole answer ----------------------------------------------------------------------------------------------

    async def _write_whole(self) -> None:
        generation, record = self._generation, self._record
        await generation.wait_for_end()
        if record.finish_reason is None or record.left_ns is not None:
            return
        parts = self._whole_parts(generation.take_pieces())
        self._stamp()
        usage = usage_of(record.prompt_tokens or 0, record.output_tokens, record.cached_tokens)
        body = self._answer.whole(parts, usage, self._timings(is_last=True))
        headers: tuple[Header, ...] = ((names.REQUEST_ID.encode(), self._request_id.encode()),)
        await send_json(self._send, 200, body, headers)

    def _whole_parts(self, pieces: list[tuple[int, Text]]) -> list[Part]:
        """Each choice's pieces put together."""
        parts = []
        for choice in self._generation.choices:
            own = [text for index, text in pieces if index == choice.index]
            content, calls = "".join([text.text for text in own]), list[Call]()
            if self._parsers:
                content, calls = self._parsed(choice.index, content, is_last=True)
            logprobs: list[SampledText] = [one for text in own for one in text.logprobs or ()]
            reason = self._reason(choice.index, choice.end)
            parts.append(Part(choice.index, content, logprobs or None, tuple(calls), reason))
        return parts

    # -- timings -----------------------------------------------------------------------------------------------------

    def _stamp(self) -> None:
        """`first_written`: set once, just before the first event that holds text (or the only one, or the body)."""
        if self._record.first_written_ns is None:
            self._record.first_written_ns = self._clock.mono_ns()

    def _timings(self, *, is_last: bool) -> Timings:
        return timings_of(self._record, self._host, is_simulated=self._is_simulated, is_last=is_last)
