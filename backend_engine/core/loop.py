"""The engine core: `ready -> launch -> commit`, in one order or another.

`ready` plans a step from what the host knows without any sampled token; `launch` hands it over and waits for nothing;
`commit` waits for its end and settles what it did. No function knows in which order the others are called:

- one after the other: the oracle, and what runs with both switches off;
- `token_interval.overlap_token_interval`: step n+1 is launched, and then n is committed while n+1 runs;
- `token_interval.async_scheduling`: a thread of its own launches, and step n+1 is planned while n runs (without overlap
  it is launched only when n is committed and its outputs are sent).

Times: a step starts at the later of its launch and the end of the step before, and ends when the device says so. The
token gap is a step's start less the previous step's end, while any request ran or waited in between.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

import msgspec

from backend_engine.core.foresight import Foresight
from backend_engine.core.forward import Forward
from backend_engine.core.messages import Abort, Gauges, Mask, Outputs, Shutdown, Step, Submit, ToCore, TokenLogprobs
from backend_engine.core.messages import Output as RequestOutput
from backend_engine.core.pages import Pages
from backend_engine.core.refusals import refusal_of
from backend_engine.core.request import Request
from backend_engine.core.scheduler import Scheduler
from backend_engine.core.slots import Slots
from backend_engine.core.step import NO_TOKEN, Chunk, Flight, OutOfDeviceMemory, StepPlan, StepResult, StepVoid
from protocol.timings import EngineState
from settings.schema import Settings
from tracing.clock import Clock

log = logging.getLogger(__name__)


class Launched(msgspec.Struct, frozen=True):
    """A step under way."""

    plan: StepPlan
    flight: Flight
    state: EngineState
    is_after_idleness: bool
    """No request ran or waited at some time since the step before."""


class EngineCore:
    """The engine without its process: hand it messages, give it turns, send on what it says.

    `draw_seed` gives a 64-bit seed to a request that brings none.
    """

    def __init__(self, forward: Forward, settings: Settings, clock: Clock, draw_seed: Callable[[], int]) -> None:
        switches = settings.token_interval
        self._forward = forward
        device = self._device = forward.device
        self._clock = clock
        self._draw_seed = draw_seed
        self.slots = Slots(settings.scheduler.max_num_seqs)
        self.pages = Pages(device.info.kv_pages, device.info.page_size)
        self._scheduler = Scheduler(
            settings.scheduler, settings.model, self.slots, self.pages, clock, reuses_slots=switches.slot_reuse
        )
        self.info = msgspec.structs.replace(
            device.info, async_scheduling=switches.async_scheduling, slot_reuse=switches.slot_reuse
        )
        self._plans_ahead = switches.async_scheduling
        self._overlaps = switches.overlap_token_interval
        self._foresight = Foresight()
        self._planned: StepPlan | None = None
        self._flights: deque[Launched] = deque()
        self._arrivals = 0
        self._has_news = False
        self._outputs: list[RequestOutput] = []
        self._steps: list[Step] = []
        self._told: Gauges | None = None
        self._last_end_ns: int | None = None
        self._was_idle = True
        self.is_shut_down = False

    # -- the loop ----------------------------------------------------------------------------------------------------

    def turn(self) -> Outputs | None:
        """One turn of the loop; returns what it has to say."""
        if self._overlaps:
            self._turn_overlapped()
        else:
            self._turn_in_order()
        return self.report()

    def _turn_overlapped(self) -> None:
        """Launches step n+1, then commits n while n+1 runs."""
        plan = self.ready()
        if plan is not None:
            self._flights.append(self.launch(plan))
        if self._flights and (plan is None or len(self._flights) > 1):
            self.commit(self._flights.popleft())

    def _turn_in_order(self) -> None:
        """Commits step n before n+1 is launched; n+1 may be planned already."""
        plan = self._planned or self.ready()
        self._planned = None
        if plan is not None:
            launched = self.launch(plan)
            if self._plans_ahead:
                self._planned = self.ready()
            self.commit(launched)

    def ready(self) -> StepPlan | None:
        """Plans the next step; None when there is nothing to run yet."""
        plan = self._scheduler.plan()
        self._has_news = plan is not None
        return plan

    def launch(self, plan: StepPlan) -> Launched:
        """Starts a step."""
        launched = Launched(plan, self._forward.start(plan), self._scheduler.state(len(plan.chunks)), self._was_idle)
        self._was_idle = False
        if not self._flights:
            self._foresight.began(self._clock.mono_ns())
        return launched

    def commit(self, launched: Launched) -> None:
        """Waits for a step's end, hands out its tokens, and retires those that end with it."""
        plan = launched.plan
        try:
            result = launched.flight.wait()
        except Exception as error:
            self._fail(plan, error)
            self._drop_what_counted_on_it()
        else:
            self._scheduler.went_well()
            gap_ns = self._gap_ns(launched, result)
            self._record(plan, result, gap_ns)
            self._last_end_ns = result.end_ns
            self._foresight.began(result.end_ns)
            is_late = all(chunk.request.is_finished for chunk in plan.chunks)  # a CPU computes nothing of such a step
            if plan.prefill_tokens == 0 and not is_late:
                self._foresight.took(result.end_ns - result.start_ns)
            sampled = iter(range(len(result.tokens)))
            for chunk in plan.chunks:
                self._settle(chunk, launched, result, gap_ns, next(sampled) if chunk.samples else None)
        self._was_idle = self._scheduler.is_idle and not self._flights
        self._has_news = True

    def report(self) -> Outputs | None:
        """What has happened since the last report; gauges alone when only they have changed."""
        gauges = self._scheduler.gauges()
        if not self._outputs and not self._steps and gauges == self._told:
            return None
        said = Outputs(self._outputs, self._steps, gauges)
        self._outputs, self._steps, self._told = [], [], gauges
        return said

    def wait_ns(self) -> int | None:
        """How long the loop may sleep for want of work: 0 not at all, None until a message comes."""
        if self._flights or self._planned is not None:
            return 0
        if self._scheduler.is_idle:
            return None
        wait_until_ns = self._scheduler.wait_until_ns()
        if wait_until_ns is not None:
            return max(0, wait_until_ns - self._clock.mono_ns())
        return 0 if self._has_news else None

    def slack_ns(self) -> int:
        """How long the next turn may wait for messages, so that who comes while a step runs is in the one after it,
        and the device does not wait. 0 where nobody could be let in."""
        if not self._overlaps or len(self._flights) != 1 or not self._scheduler.can_let_in:
            return 0
        return max(0, self._foresight.plan_by_ns() - self._clock.mono_ns())

    def close(self) -> None:
        """No turn comes any more."""
        self._forward.close()

    # -- messages ----------------------------------------------------------------------------------------------------

    def take(self, message: ToCore) -> None:
        """Takes one message of the frontend. Called between turns, so no further step holds what is aborted."""
        self._has_news = True
        if isinstance(message, Submit):
            self._submit(message)
        elif isinstance(message, Abort):
            self._abort(message)
        elif isinstance(message, Mask):
            request = self._scheduler.find(message.request_id)
            if request is not None:
                request.mask = message
        elif isinstance(message, Shutdown):
            self.is_shut_down = True

    def _submit(self, submit: Submit) -> None:
        if self._scheduler.find(submit.request_id) is not None:
            log.error("request id %s was submitted twice; the second is ignored", submit.request_id)
            return
        info = self._device.info
        seed = submit.sampling.seed if submit.sampling.seed is not None else self._draw_seed()
        self._arrivals += 1
        request = Request(submit, seed, info.max_model_len, info.page_size, self._arrivals)
        refusal = refusal_of(submit, info, self._scheduler.waiting)
        if refusal is not None:
            self._end(request, "error", error_code=refusal[0], error=refusal[1])
            return
        if self._last_end_ns is not None and submit.queued_ns <= self._last_end_ns:
            self._was_idle = False  # it was waiting already when the last step ended
        self._scheduler.add(request)

    def _abort(self, abort: Abort) -> None:
        request = self._scheduler.find(abort.request_id)
        if request is None or request.abort_asked_ns is not None:
            return
        request.abort_asked_ns = abort.asked_ns
        self._scheduler.withdraw(request)
        self._leave(request)
        self._was_idle = self._was_idle or (self._scheduler.is_idle and not self._flights)

    # -- settling a step ---------------------------------------------------------------------------------------------

    def _settle(
        self, chunk: Chunk, launched: Launched, result: StepResult, gap_ns: int | None, sampled: int | None
    ) -> None:
        """One sequence's part in a step; `sampled` says which of the step's tokens is its own."""
        request = chunk.request
        request.in_flight -= 1
        if not (request.is_finished or request.has_ended) and chunk.epoch == request.epoch:
            self._advance(chunk, launched, result, gap_ns, sampled)
        self._leave(request)

    def _advance(
        self, chunk: Chunk, launched: Launched, result: StepResult, gap_ns: int | None, sampled: int | None
    ) -> None:
        request = chunk.request
        if not chunk.decodes:
            request.began(result.start_ns, launched.state)
        if sampled is not None and request.prefill_end_ns is not None:
            request.decoded(len(launched.plan.chunks), gap_ns)
        if sampled is not None and result.tokens[sampled] == NO_TOKEN:
            text = "The model gave no usable numbers for this request (NaN or infinity)."
            self._end(request, "error", error_code="engine_error", error=text)
            return
        request.kv_tokens = chunk.start + chunk.count
        self._scheduler.landed(request)
        if sampled is not None:
            told = result.logprobs[sampled] if result.logprobs is not None else None
            self._sampled(request, result.tokens[sampled], told, result.end_ns)

    def _sampled(self, request: Request, token: int, told: TokenLogprobs | None, end_ns: int) -> None:
        is_first = request.prefill_end_ns is None
        reason = request.sampled(token, end_ns)
        if request.abort_asked_ns is not None:
            return  # nobody waits for it; it is counted as made in vain
        scheduled = request.scheduled() if is_first else None
        finished = None
        if reason is not None:
            self._scheduler.withdraw(request)
            self._scheduler.finish(request)
            finished = request.finished(reason, self._clock.mono_ns())
        logprobs = None if told is None else [told]
        self._outputs.append(RequestOutput(request.id, [token], end_ns, scheduled, finished, logprobs))

    def _leave(self, request: Request) -> None:
        """Gives back what a request holds if it is leaving and no step in flight holds it; an abort ends with that."""
        is_released = self._scheduler.release_if_landed(request)
        if is_released and not request.is_finished and request.abort_asked_ns is not None:
            self._end(request, "abort")

    def _end(self, request: Request, reason: str, *, error: str | None = None, error_code: str | None = None) -> None:
        """The last word on a request that ends without a token of its own."""
        self._scheduler.withdraw(request)
        self._scheduler.finish(request)
        self._scheduler.release_if_landed(request)
        ended_ns = self._clock.mono_ns()
        finished = request.finished(reason, ended_ns, error=error, error_code=error_code)
        self._outputs.append(RequestOutput(request.id, [], request.last_token_ns or ended_ns, None, finished))

    def _fail(self, plan: StepPlan, error: Exception) -> None:
        """A step failed, or is void with one that did. For want of memory it is tried again smaller, or its newest
        request ends; for any other reason its requests end. The others go on."""
        self._last_end_ns = None  # when the device was done is unknown, so the next gap is too
        for chunk in plan.chunks:
            chunk.request.in_flight -= 1
        if isinstance(error, StepVoid):
            self._roll_back(plan)
            return
        log.error("a step of %d sequences and %d tokens failed", len(plan.chunks), plan.tokens, exc_info=error)
        if isinstance(error, OutOfDeviceMemory):
            victim = self._scheduler.ran_out_of_memory(plan)
            if victim is not None:
                self._end(victim, "error", error_code="engine_out_of_memory", error=str(error))
        else:
            text = f"The engine's step failed ({type(error).__name__}); its log says why."
            for chunk in plan.chunks:
                if not chunk.request.is_finished and chunk.epoch == chunk.request.epoch:
                    self._end(chunk.request, "error", error_code="engine_error", error=text)
        self._roll_back(plan)

    def _roll_back(self, plan: StepPlan) -> None:
        """Nothing of a step counts: its requests begin again where their last good step ended."""
        for chunk in plan.chunks:
            if not chunk.request.is_finished and chunk.epoch == chunk.request.epoch:
                chunk.request.roll_back()
            self._leave(chunk.request)

    def _drop_what_counted_on_it(self) -> None:
        """After a step failed: settles the steps under way, and plans none before the failure is known everywhere."""
        while self._flights:
            self.commit(self._flights.popleft())
        if self._planned is not None:
            planned, self._planned = self._planned, None
            for chunk in planned.chunks:
                chunk.request.in_flight -= 1
            self._roll_back(planned)
        self._forward.resume()

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

    def _gap_ns(self, launched: Launched, result: StepResult) -> int | None:
        """The token gap before this step; None for the first one and after idleness."""
        if self._last_end_ns is None or launched.is_after_idleness:
            return None
        return result.start_ns - self._last_end_ns
