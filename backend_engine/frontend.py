"""The frontend's heart: requests on one side, the core's messages on the other, and what is known of both."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor

from backend_engine.core.messages import Abort, Failed, FromCore, Outputs, Ready, Submit
from backend_engine.core_link import CoreLink
from backend_engine.generation import Generation
from backend_engine.metrics import EngineMetrics
from backend_engine.prompts import Limits, is_long, sampling_for, tokens_of
from backend_engine.record import RequestRecord
from backend_engine.requests import Conversation, GenerationRequest, Prompt
from backend_engine.spans import SpanWriter
from backend_engine.text.tokenizer import Tokenizer
from protocol.errors import ApiError
from protocol.ids import new_request_id
from settings.schema import Settings
from tracing.clock import Clock

log = logging.getLogger(__name__)

LOADING_RETRY_SECONDS = 2.0


class Frontend:
    """Admits requests, hands them to the core, gives its outputs to those who wait, and closes each record once."""

    def __init__(
        self, settings: Settings, link: CoreLink, clock: Clock, metrics: EngineMetrics, spans: SpanWriter
    ) -> None:
        self.settings = settings
        self.clock = clock
        self.model = settings.engine_model_name
        self.started_s = clock.wall_ns() // 10**9
        self.metrics = metrics
        self.ready: Ready | None = None
        self.tokenizer: Tokenizer | None = None
        self.failure: str | None = None
        """Why the core is lost; nothing is admitted any more."""
        self._spans = spans
        self._link = link
        self._generations: dict[str, Generation] = {}
        self._waited_for = 0
        self._max_in_flight = settings.server.max_concurrent_requests
        self._tokenizing = ThreadPoolExecutor(1, "tokenize")
        self._core_said = asyncio.Event()

    # -- what is served ----------------------------------------------------------------------------------------------

    @property
    def is_serving(self) -> bool:
        """Model and tokenizer are loaded and the core lives."""
        return self.ready is not None and self.tokenizer is not None and self.failure is None

    @property
    def is_simulated(self) -> bool:
        """The device has known times and draws letters."""
        return self.ready is not None and self.ready.device == "simulated"

    def serving(self) -> tuple[Tokenizer, Limits]:
        """The tokenizer and the model's limits. Raises ApiError 503 while there is nothing to serve with."""
        if self.failure is not None:
            raise self._lost()
        if self.ready is None or self.tokenizer is None:
            raise ApiError(
                503,
                "upstream_unavailable",
                f"The engine is still loading the model '{self.model}'. Try again in a moment.",
                retry_after=LOADING_RETRY_SECONDS,
            )
        return self.tokenizer, Limits.of(self.ready, self.settings.model.max_tokens)

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

    async def tokenize(self, source: Conversation | Prompt) -> list[int]:
        """The prompt's tokens; a long one is tokenised beside the event loop. Raises ApiError."""
        tokenizer, limits = self.serving()
        if is_long(source):
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._tokenizing, tokens_of, source, tokenizer, limits)
        return tokens_of(source, tokenizer, limits)

    def submit(self, request: GenerationRequest, tokens: list[int], record: RequestRecord) -> Generation:
        """Hands a request to the core. Raises ApiError when there is no core or no room."""
        tokenizer, limits = self.serving()
        if self._waited_for >= self._max_in_flight:
            raise ApiError(
                429,
                "queue_full",
                f"{self._waited_for} requests are in flight in this engine, which is its limit "
                "(server.max_concurrent_requests).",
                retry_after=1.0,
            )
        parameters = request.parameters
        sampling = sampling_for(parameters, len(tokens), limits)
        record.is_stream = parameters.is_stream
        record.max_tokens = sampling.max_tokens
        record.temperature = sampling.temperature
        record.top_p = sampling.top_p
        record.prompt_tokens = len(tokens)
        generation = Generation(
            new_request_id(), record, tokenizer.detokenizer(), parameters.stops, sampling.stop_token_ids
        )
        self._generations[generation.request_id] = generation
        self._waited_for += 1
        record.queued_ns = self.clock.mono_ns()
        self._link.send(Submit(generation.request_id, tokens, sampling, record.queued_ns))
        return generation

    def leave(self, generation: Generation) -> None:
        """The client is gone."""
        if generation.record.ended_ns is None:
            generation.leave(self.clock.mono_ns())
            self._abort(generation)

    def _abort(self, generation: Generation) -> None:
        """Nobody waits for more of this answer: slot and pages are wanted back."""
        if generation.record.finished is None and self.failure is None:
            self._link.send(Abort(generation.request_id, generation.record.left_ns or self.clock.mono_ns()))

    def end(self, generation: Generation) -> None:
        """The answer was written, or will never be. The record closes when the core has said its last word too."""
        if not generation.is_over:
            generation.fail(ApiError(503, "engine_unavailable", "The engine is ending; this answer was cut short."))
            self._abort(generation)
        self._waited_for -= 1
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
        if self._generations.pop(generation.request_id, None) is not None:
            self.metrics.closed(record)
            self._spans.write(record)

    # -- the core ----------------------------------------------------------------------------------------------------

    def take(self, message: FromCore) -> None:
        """One message of the core."""
        if isinstance(message, Outputs):
            self._take_outputs(message)
        elif isinstance(message, Ready):
            self.ready = message
            self.metrics.describe(message)
            self._core_said.set()
        elif isinstance(message, Failed):
            self.lose_core(message.message)

    def _take_outputs(self, message: Outputs) -> None:
        began_ns = self.clock.mono_ns()
        for output in message.outputs:
            generation = self._generations.get(output.request_id)
            if generation is None:
                continue
            record = generation.record
            was_over = generation.is_over
            last_token_ns, was_scheduled = record.last_token_ns, record.scheduled is not None
            if generation.take(output):
                self._abort(generation)
            if not was_over and output.tokens:
                if not was_scheduled:
                    self.metrics.first_token(record)
                self.metrics.tokens(len(output.tokens), last_token_ns, output.step_end_ns)
            if output.finished is not None:
                self._settle(generation)
        if message.outputs:
            self.metrics.detokenized(self.clock.mono_ns() - began_ns)
        self.metrics.core(message)

    def lose_core(self, why: str) -> None:
        """The core is gone: whoever waits is told, and nobody is admitted any more."""
        if self.failure is not None:
            return
        self.failure = why
        self._core_said.set()
        for generation in list(self._generations.values()):
            generation.fail(self._lost())
            self._settle(generation)

    def close(self) -> None:
        """No request comes any more."""
        self._tokenizing.shutdown(wait=False, cancel_futures=True)
