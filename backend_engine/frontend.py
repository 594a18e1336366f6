"""The frontend's heart: requests on one side, the core's messages on the other, and what is known of both."""

from __future__ import annotations

import asyncio
import logging

from backend_engine.core.messages import (
    Abort,
    Failed,
    Mask,
    Output,
    Outputs,
    Ready,
    Submit,
    decode_from_core,
)
from backend_engine.core_link import CoreLink
from backend_engine.generation import Choice, Generation
from backend_engine.metrics import EngineMetrics
from backend_engine.prompts import Limits, check_letters, check_prompt, check_request, sampling_for
from backend_engine.record import RequestRecord
from backend_engine.requests import GenerationRequest
from backend_engine.spans import SpanWriter
from backend_engine.text.service import TextService
from backend_engine.text.wire import Open, Texts
from protocol.errors import ApiError
from protocol.ids import new_request_id
from settings.schema import Settings
from tracing.clock import Clock

log = logging.getLogger(__name__)

LOADING_RETRY_SECONDS = 2.0


class Frontend:
    """Admits requests, hands them to the core, gives what is made of its outputs to those who wait, and closes each
    record once."""

    def __init__(
        self,
        settings: Settings,
        link: CoreLink,
        text: TextService,
        clock: Clock,
        metrics: EngineMetrics,
        spans: SpanWriter,
    ) -> None:
        self.settings = settings
        self.clock = clock
        self.model = settings.engine_model_name
        self.started_s = clock.wall_ns() // 10**9
        self.metrics = metrics
        self.text = text
        self.ready: Ready | None = None
        self.failure: str | None = None
        """Why the core is lost; nothing is admitted any more."""
        self._spans = spans
        self._link = link
        self._choices: dict[str, Choice] = {}
        self._waited_for = 0
        """Answers that somebody waits for."""
        self._max_in_flight = settings.server.max_concurrent_requests
        self._core_said = asyncio.Event()

    # -- what is served ----------------------------------------------------------------------------------------------

    @property
    def is_serving(self) -> bool:
        """The model is loaded, text can be made, and the core lives."""
        return self.ready is not None and self.text.is_ready and self.failure is None

    @property
    def is_simulated(self) -> bool:
        """The device has known times and draws letters."""
        return self.ready is not None and self.ready.device == "simulated"

    def serving(self) -> Limits:
        """The model's limits. Raises ApiError 503 while there is nothing to serve with."""
        if self.failure is not None:
            raise self._lost()
        if self.ready is None or not self.text.is_ready:
            raise ApiError(
                503,
                "upstream_unavailable",
                f"The engine is still loading the model '{self.model}'. Try again in a moment.",
                retry_after=LOADING_RETRY_SECONDS,
            )
        return Limits.of(self.ready, self.settings.model.max_tokens)

    def _lost(self) -> ApiError:
        return ApiError(
            503,
            "engine_unavailable",
            "The engine's core ended while this request was with it; the engine is being restarted. Try again.",
            retry_after=LOADING_RETRY_SECONDS,
        )

    async def core_ready(self) -> Ready:
        """Waits for the core's Ready. Raises RuntimeError with its message when it failed instead."""
        await self._core_said.wait()
        if self.ready is None:
            raise RuntimeError(self.failure)
        return self.ready

    # -- requests ----------------------------------------------------------------------------------------------------

    async def tokenize(self, request: GenerationRequest) -> tuple[list[int], str | None]:
        """The prompt's tokens, and the grammar that its answer follows. Raises ApiError."""
        limits = self.serving()
        grammar = check_request(request, limits, self.text.tool_format)
        check_letters(request, limits)
        try:
            tokens = await self.text.encode(request.source, grammar)
        except ApiError as error:
            if error.param == "response_format" and request.grammar is None:
                error.param = "tools"  # the grammar that can't be followed came from there
            raise
        check_prompt(tokens, request.param, limits)
        return tokens, grammar

    def submit(
        self, request: GenerationRequest, tokens: list[int], grammar: str | None, record: RequestRecord
    ) -> Generation:
        """Hands a request to the core, once for each choice. Raises ApiError when there is no core or no room."""
        limits = self.serving()
        parameters = request.parameters
        if self._waited_for + parameters.choices > self._max_in_flight:
            raise ApiError(
                429,
                "queue_full",
                f"{self._waited_for} requests are in flight in this engine, and its limit is {self._max_in_flight} "
                "(server.max_concurrent_requests; each of 'n' answers counts).",
                retry_after=1.0,
            )
        generation = Generation(record, [new_request_id() for _ in range(parameters.choices)])
        record.is_stream = parameters.is_stream
        record.temperature = parameters.temperature
        record.top_p = parameters.top_p
        record.prompt_tokens = len(tokens)
        self._waited_for += parameters.choices
        record.queued_ns = self.clock.mono_ns()
        for choice in generation.choices:
            sampling = sampling_for(parameters, len(tokens), limits, choice=choice.index, is_masked=grammar is not None)
            record.max_tokens = sampling.max_tokens
            self._choices[choice.request_id] = choice
            self._link.send(Submit(choice.request_id, tokens, sampling, record.queued_ns))
            wants_logprobs = parameters.logprobs is not None
            self.text.open(Open(choice.request_id, parameters.stops, sampling.stop_token_ids, wants_logprobs, grammar))
        return generation

    def leave(self, generation: Generation) -> None:
        """The client is gone."""
        if generation.record.ended_ns is None:
            generation.leave(self.clock.mono_ns())
            self._abort(generation)

    def _abort(self, generation: Generation) -> None:
        """Nobody waits for more of these answers: slots and pages are wanted back."""
        asked_ns = generation.record.left_ns or self.clock.mono_ns()
        for choice in generation.unfinished:
            self._abort_one(choice, asked_ns)

    def _abort_one(self, choice: Choice, asked_ns: int) -> None:
        if self.failure is None:
            self._link.send(Abort(choice.request_id, asked_ns))

    def end(self, generation: Generation) -> None:
        """The answer was written, or will never be. The record closes when the core has said its last word too."""
        if not generation.is_over:
            generation.fail(ApiError(503, "engine_unavailable", "The engine is ending; this answer was cut short."))
            self._abort(generation)
        self._waited_for -= len(generation.choices)
        generation.record.ended_ns = self.clock.mono_ns()
        self._settle(generation)

    def refuse(self, record: RequestRecord, error: ApiError) -> None:
        """A request that never reached the core."""
        record.error = error
        record.ended_ns = self.clock.mono_ns()
        self._spans.write(record)

    def drop(self, record: RequestRecord) -> None:
        """A request whose client left before it reached the core."""
        record.ended_ns = self.clock.mono_ns()
        record.left_ns = record.left_ns or record.ended_ns
        self._spans.write(record)

    def _settle(self, generation: Generation) -> None:
        record = generation.record
        if record.ended_ns is None or (record.finished is None and self.failure is None):
            return
        known = [self._choices.pop(choice.request_id, None) for choice in generation.choices]
        if any(known):
            self.metrics.closed(record)
            self._spans.write(record)

    # -- the core ----------------------------------------------------------------------------------------------------

    async def read(self, data: bytes) -> None:
        """One message of the core, as it came; waits while whoever makes text is too far behind."""
        self.take(data)
        await self.text.room()

    def take(self, data: bytes) -> None:
        """One message of the core, as it came. Marks, counts and ends are taken here, whatever becomes of the text."""
        message = decode_from_core(data)
        if isinstance(message, Outputs):
            for output in message.outputs:
                choice = self._choices.get(output.request_id)
                if choice is not None:
                    self._account(choice, output)
            self.metrics.core(message)
            self.text.take(message, data)
            for output in message.outputs:
                if output.finished is not None and output.request_id in self._choices:
                    self._settle(self._choices[output.request_id].generation)
        elif isinstance(message, Ready):
            self.ready = message
            self.metrics.describe(message)
            self._core_said.set()
        elif isinstance(message, Failed):
            self.lose_core(message.message)

    def _account(self, choice: Choice, output: Output) -> None:
        generation = choice.generation
        if output.scheduled is not None and generation.schedule(output.scheduled) and not generation.is_over:
            self.metrics.first_token(generation.record)
        if output.tokens:
            if not generation.is_over:
                self.metrics.tokens(len(output.tokens), choice.last_step_ns, output.step_end_ns)
            choice.last_step_ns = output.step_end_ns
        if output.finished is not None:
            generation.finish(choice, output.finished)

    def lose_core(self, why: str) -> None:
        """The core is gone: whoever waits is told, and nobody is admitted any more."""
        if self.failure is not None:
            return
        self.failure = why
        self._core_said.set()
        for choice in list(self._choices.values()):
            choice.generation.fail(self._lost())
            self._settle(choice.generation)

    # -- text --------------------------------------------------------------------------------------------------------

    def take_texts(self, texts: Texts) -> None:
        """What was made of one message of the core."""
        for text in texts.texts:
            choice = self._choices.get(text.request_id)
            if choice is not None and choice.generation.take(choice, text):
                if choice.generation.record.error is not None:
                    self._abort(choice.generation)
                else:
                    self._abort_one(choice, self.clock.mono_ns())
        for mask in texts.masks:
            self._link.send(Mask(mask.request_id, mask.output, mask.allowed))
        if texts.is_step:
            self.metrics.detokenized(texts.spent_ns)

    def lose_texts(self, error: ApiError) -> None:
        """Whoever waits for text is told, and the core makes no more of it."""
        for choice in list(self._choices.values()):
            generation = choice.generation
            if not generation.is_over:
                generation.fail(error)
                self._abort(generation)

    def tokenized(self, spent_ns: int) -> None:
        """A prompt became tokens."""
        self.metrics.tokenized(spent_ns)
