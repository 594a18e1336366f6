"""The scheduler: who runs in the next step.

First come, first served. Decoding sequences come first; what is left of the token budget goes to prompts, in chunks. A
request is admitted when a slot is free and pages for its longest possible answer are free too, so that nothing that
runs can ever run out of pages; one that must wait for pages holds its place, and those behind it wait as well.
"""

from __future__ import annotations

import logging
from collections import deque

from backend_engine.core.messages import Gauges
from backend_engine.core.pages import Pages
from backend_engine.core.request import Request
from backend_engine.core.slots import Slot, Slots
from backend_engine.core.step import Chunk, StepPlan
from protocol.timings import EngineState
from settings.schema import ModelSettings, SchedulerSettings
from tracing.clock import Clock

log = logging.getLogger(__name__)


class Scheduler:
    """Owns the queue and the running set; takes slots and pages at admission and gives them back at retirement.

    The queue is bounded by whoever adds to it (`EngineCore.take`).
    """

    def __init__(
        self, settings: SchedulerSettings, model: ModelSettings, slots: Slots, pages: Pages, clock: Clock
    ) -> None:
        if settings.max_num_batched_tokens < settings.max_num_seqs:
            raise ValueError(
                f"scheduler.max_num_batched_tokens = {settings.max_num_batched_tokens} is less than "
                f"scheduler.max_num_seqs = {settings.max_num_seqs}: a full batch could not decode in one step; "
                "raise the first or lower the second"
            )
        self._slots = slots
        self._pages = pages
        self._clock = clock
        self._budget_tokens = settings.max_num_batched_tokens
        self._is_chunked = settings.enable_chunked_prefill
        self._batch_wait_ns = round(model.batch_wait_ms * 1e6)
        self._queue_warn_ms = settings.queue_warn_ms
        self._waiting: dict[str, Request] = {}
        self._running: dict[str, Request] = {}
        self._not_warned: deque[Request] = deque()

    @property
    def is_idle(self) -> bool:
        """No request runs or waits."""
        return not self._running and not self._waiting

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    def gauges(self) -> Gauges:
        """The state now."""
        return Gauges(len(self._running), len(self._waiting), self._pages.used, self._pages.count)

    def state(self, batch: int) -> EngineState:
        """The state now, as a request scheduled in a step of `batch` sequences is told."""
        return EngineState(len(self._running), len(self._waiting), self._pages.used / self._pages.count, batch)

    def find(self, request_id: str) -> Request | None:
        """A request that runs or waits."""
        return self._running.get(request_id) or self._waiting.get(request_id)

    def add(self, request: Request) -> None:
        """Puts a request at the end of the queue."""
        self._waiting[request.id] = request
        self._not_warned.append(request)

    def retire(self, request: Request) -> None:
        """Takes a request out of the queue or the running set; its slot and pages are free from here on."""
        self._waiting.pop(request.id, None)
        if self._running.pop(request.id, None) is not None and request.slot is not None:
            self._pages.give_back(request.slot.pages)
            self._slots.give_back(request.slot)
            request.slot = None

    def wait_until_ns(self) -> int | None:
        """When an idle engine that waits for company begins at the latest; None when it does not wait."""
        if self._batch_wait_ns == 0 or self._running or not self._waiting or len(self._waiting) >= self._slots.count:
            return None
        oldest = next(iter(self._waiting.values()))
        return oldest.queued_ns + self._batch_wait_ns

    def plan(self) -> StepPlan | None:
        """The next step, or None when nothing can run now."""
        began_ns = self._clock.mono_ns()
        self._warn_of_long_waits(began_ns)
        wait_until_ns = self.wait_until_ns()
        if wait_until_ns is not None and began_ns < wait_until_ns:
            return None

        chunks = [self._decode(request) for request in self._running.values() if request.wants_decode]
        decodes = len(chunks)
        left = self._budget_tokens - decodes
        left = self._continue_prefills(chunks, left)
        opened = self._admit(chunks, left)
        if not chunks:
            return None
        tokens = sum(chunk.count for chunk in chunks)
        return StepPlan(tuple(opened), tuple(chunks), decodes, tokens, self._clock.mono_ns() - began_ns)

    def _decode(self, request: Request) -> Chunk:
        assert request.slot is not None
        start = request.promised_kv_tokens
        request.promised_kv_tokens += 1
        request.promised_outputs += 1
        return Chunk(request, request.slot.index, start, 1, samples=True, decodes=True)

    def _continue_prefills(self, chunks: list[Chunk], left: int) -> int:
        """Adds the next pieces of admitted prompts; returns what is left of the budget."""
        for request in self._running.values():
            if request.prefill_left and left > 0:
                left -= self._prefill(request, chunks, left)
        return left

    def _admit(self, chunks: list[Chunk], left: int) -> list[Slot]:
        """Admits from the head of the queue while slots, pages and budget last, and adds their first pieces."""
        opened: list[Slot] = []
        while self._waiting and self._slots.can_take():
            request = next(iter(self._waiting.values()))
            pages_needed = self._pages.needed(request.most_tokens)
            if not self._has_room(request, chunks, left) or not self._pages.can_take(pages_needed):
                break
            del self._waiting[request.id]
            pages = self._pages.take(pages_needed)
            request.slot = self._slots.take(request.id, request.prompt, pages, request.sampling, request.seed)
            self._running[request.id] = request
            opened.append(request.slot)
            left -= self._prefill(request, chunks, left)
        return opened

    def _has_room(self, request: Request, chunks: list[Chunk], left: int) -> bool:
        """In chunks, any budget will do. In one piece, the prompt must fit, or be the only prompt of its step:
        a prompt longer than the budget runs too, and one that nearly fills it isn't starved by those who decode."""
        if self._is_chunked:
            return left > 0
        return len(request.prompt) <= left or all(chunk.decodes for chunk in chunks)

    def _prefill(self, request: Request, chunks: list[Chunk], left: int) -> int:
        """Adds one piece of a prompt; returns its tokens."""
        assert request.slot is not None
        start = request.promised_kv_tokens
        count = min(request.prefill_left, left) if self._is_chunked else request.prefill_left
        request.promised_kv_tokens += count
        is_last = request.prefill_left == 0
        request.promised_outputs += is_last
        chunks.append(Chunk(request, request.slot.index, start, count, samples=is_last, decodes=False))
        return count

    def _warn_of_long_waits(self, now_ns: int) -> None:
        """One line for each request that has waited longer than scheduler.queue_warn_ms, as soon as it has."""
        while self._not_warned:
            request = self._not_warned[0]
            is_waiting = request.id in self._waiting
            waited_ms = (now_ns - request.queued_ns) / 1e6
            if is_waiting and waited_ms <= self._queue_warn_ms:
                return
            self._not_warned.popleft()
            if is_waiting:
                state = self.gauges()
                log.warning(
                    "request %s has waited %.0f ms in the engine's queue (scheduler.queue_warn_ms = %g): "
                    "%d running in %d slots, %d waiting, %d of %d KV pages in use",
                    request.id,
                    waited_ms,
                    self._queue_warn_ms,
                    state.running,
                    self._slots.count,
                    state.waiting,
                    state.kv_used,
                    state.kv_pages,
                )
