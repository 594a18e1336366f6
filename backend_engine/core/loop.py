"""The engine core: one turn is `ready -> launch -> commit`, here in its synchronous order.

`ready` plans a step from what the host knows without any sampled token; `launch` hands it to the device and waits for
nothing; `commit` waits for its end and settles what it did. No function knows in which order the others are called.

Times: a step starts at the later of its launch and the end of the step before, and ends when the device says so. The
token gap is a step's start less the previous step's end, while any request ran or waited in between.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from backend_engine.core.messages import Abort, Outputs, Shutdown, Step, Submit, ToCore
from backend_engine.core.messages import Output as RequestOutput
from backend_engine.core.pages import Pages
from backend_engine.core.request import Request
from backend_engine.core.scheduler import Scheduler
from backend_engine.core.slots import Slots
from backend_engine.core.step import NO_TOKEN, Chunk, Device, Flight, OutOfDeviceMemory, StepPlan, StepResult
from protocol.timings import EngineState
from settings.schema import Settings
from tracing.clock import Clock

log = logging.getLogger(__name__)

MAX_WAITING = 16_384
"""Requests that may wait in the core's queue; one more is refused with `queue_full`."""


class Launched(msgspec.Struct, frozen=True):
    """A step under way."""

    plan: StepPlan
    flight: Flight
    state: EngineState


class EngineCore:
    """The engine without its process: hand it messages, give it turns, send on what it says.

    `draw_seed` gives a 64-bit seed to a request that brings none.
    """

    def __init__(self, device: Device, settings: Settings, clock: Clock, draw_seed: Callable[[], int]) -> None:
        self._device = device
        self._clock = clock
        self._draw_seed = draw_seed
        self.slots = Slots(settings.scheduler.max_num_seqs)
        self.pages = Pages(device.info.kv_pages, device.info.page_size)
        self._scheduler = Scheduler(settings.scheduler, settings.model, self.slots, self.pages, clock)
        self._outputs: list[RequestOutput] = []
        self._steps: list[Step] = []
        self._is_gauge_stale = False
        self._last_end_ns: int | None = None
        self._was_idle = True
        self.is_shut_down = False

    # -- the loop ----------------------------------------------------------------------------------------------------

    def turn(self) -> Outputs | None:
        """One turn of the loop; returns what it has to say."""
        plan = self.ready()
        if plan is not None:
            launched = self.launch(plan)
            if launched is not None:
                self.commit(launched)
        return self.report()

    def ready(self) -> StepPlan | None:
        """Plans the next step; None when there is nothing to run yet."""
        return self._scheduler.plan()

    def launch(self, plan: StepPlan) -> Launched | None:
        """Starts a step; None when it failed at once."""
        state = self._scheduler.state(len(plan.chunks))
        try:
            return Launched(plan, self._device.launch(plan), state)
        except Exception as error:
            self._fail(plan, error)
            return None

    def commit(self, launched: Launched) -> None:
        """Waits for a step's end, hands out its tokens, and retires those that end with it."""
        plan = launched.plan
        try:
            result = launched.flight.wait()
        except Exception as error:
            self._fail(plan, error)
            return
        gap_ns = self._gap_ns(result)
        self._record(plan, result, gap_ns)
        sampled = iter(result.tokens)
        for chunk in plan.chunks:
            self._settle(chunk, launched, result, gap_ns, next(sampled) if chunk.samples else None)
        self._last_end_ns = result.end_ns
        self._was_idle = self._scheduler.is_idle

    def report(self) -> Outputs | None:
        """What has happened since the last report; gauges alone after an abort or a new arrival."""
        if not self._outputs and not self._steps and not self._is_gauge_stale:
            return None
        said = Outputs(self._outputs, self._steps, self._scheduler.gauges())
        self._outputs, self._steps, self._is_gauge_stale = [], [], False
        return said

    def wait_ns(self) -> int | None:
        """How long the loop may sleep for want of work: 0 not at all, None until a message comes."""
        if self._scheduler.is_idle:
            return None
        wait_until_ns = self._scheduler.wait_until_ns()
        return 0 if wait_until_ns is None else max(0, wait_until_ns - self._clock.mono_ns())

    # -- messages ----------------------------------------------------------------------------------------------------

    def take(self, message: ToCore) -> None:
        """Takes one message of the frontend. Called between turns, so an abort frees slot and pages before any
        further step is launched."""
        if isinstance(message, Submit):
            self._submit(message)
        elif isinstance(message, Abort):
            self._abort(message)
        elif isinstance(message, Shutdown):
            self.is_shut_down = True

    def _submit(self, submit: Submit) -> None:
        if self._scheduler.find(submit.request_id) is not None:
            log.error("request id %s was submitted twice; the second is ignored", submit.request_id)
            return
        seed = submit.sampling.seed if submit.sampling.seed is not None else self._draw_seed()
        request = Request(submit, seed, self._device.info.max_model_len)
        refusal = self._refusal(submit)
        if refusal is not None:
            self._end(request, "error", self._clock.mono_ns(), error_code=refusal[0], error=refusal[1])
            return
        if self._last_end_ns is not None and submit.queued_ns <= self._last_end_ns:
            self._was_idle = False  # it was waiting already when the last step ended
        self._scheduler.add(request)
        self._is_gauge_stale = True

    def _refusal(self, submit: Submit) -> tuple[str, str] | None:
        """Error code and text when a request cannot run; nobody else's step is spoiled by it then."""
        info = self._device.info
        prompt = submit.prompt
        if not prompt:
            return "invalid_prompt", "The prompt has no tokens; send at least one."
        if submit.sampling.max_tokens < 1:
            return "invalid_prompt", f"max_tokens = {submit.sampling.max_tokens}: it must be at least 1."
        if min(prompt) < 0 or max(prompt) >= info.vocab_size:
            worst = min(prompt) if min(prompt) < 0 else max(prompt)
            return "invalid_prompt", f"Token id {worst} is not in the model's vocabulary of {info.vocab_size} ids."
        if len(prompt) >= info.max_model_len:
            return (
                "context_length_exceeded",
                f"The prompt has {len(prompt)} tokens and the model's limit is {info.max_model_len}, answer included; "
                "shorten the prompt.",
            )
        if self._scheduler.waiting >= MAX_WAITING:
            return "queue_full", f"{MAX_WAITING} requests wait in the engine already; try again later."
        return None

    def _abort(self, abort: Abort) -> None:
        request = self._scheduler.find(abort.request_id)
        if request is not None:
            self._end(request, "abort", asked_ns=abort.asked_ns)
            self._was_idle = self._was_idle or self._scheduler.is_idle

    # -- settling a step ---------------------------------------------------------------------------------------------

    def _settle(
        self, chunk: Chunk, launched: Launched, result: StepResult, gap_ns: int | None, token: int | None
    ) -> None:
        request = chunk.request
        if chunk.decodes:
            request.decoded(len(launched.plan.chunks), gap_ns)
        else:
            request.began(result.start_ns, launched.state)
            request.chunks += 1
        if token is None:
            return
        if token == NO_TOKEN:
            text = "The model gave no usable numbers for this request (NaN or infinity)."
            self._end(request, "error", error_code="engine_error", error=text)
            return
        is_first = request.prefill_end_ns is None
        reason = request.sampled(token, result.end_ns)
        scheduled = request.scheduled() if is_first else None
        if reason is None:
            self._outputs.append(RequestOutput(request.id, [token], result.end_ns, scheduled))
            return
        self._scheduler.retire(request)
        finished = request.finished(reason, self._clock.mono_ns())
        self._outputs.append(RequestOutput(request.id, [token], result.end_ns, scheduled, finished))

    def _end(
        self,
        request: Request,
        reason: str,
        ended_ns: int | None = None,
        *,
        asked_ns: int | None = None,
        error: str | None = None,
        error_code: str | None = None,
    ) -> None:
        """Retires a request that ends without a token of its own."""
        self._scheduler.retire(request)
        ended_ns = self._clock.mono_ns() if ended_ns is None else ended_ns
        finished = request.finished(reason, ended_ns, asked_ns=asked_ns, error=error, error_code=error_code)
        self._outputs.append(RequestOutput(request.id, [], request.last_token_ns or ended_ns, None, finished))
        self._is_gauge_stale = True

    def _fail(self, plan: StepPlan, error: Exception) -> None:
        """Ends the requests of a step that failed; the others go on."""
        log.error("a step of %d sequences and %d tokens failed", len(plan.chunks), plan.tokens, exc_info=error)
        if isinstance(error, OutOfDeviceMemory):
            code, text = "engine_out_of_memory", str(error)
        else:
            code, text = "engine_error", f"The engine's step failed ({type(error).__name__}); its log says why."
        for chunk in plan.chunks:
            self._end(chunk.request, "error", error_code=code, error=text)
        self._last_end_ns = None  # when the device was done is unknown, so the next gap is too

    def _record(self, plan: StepPlan, result: StepResult, gap_ns: int | None) -> None:
        self._steps.append(
            Step(
                batch=len(plan.chunks),
                tokens=plan.tokens,
                forward_ns=result.end_ns - result.start_ns,
                gap_ns=gap_ns,
                schedule_ns=plan.schedule_ns,
                slot_kernel_ns=result.slot_kernel_ns,
            )
        )

    def _gap_ns(self, result: StepResult) -> int | None:
        """The token gap before this step; None for the first one and after idleness."""
        if self._last_end_ns is None or self._was_idle:
            return None
        return result.start_ns - self._last_end_ns
