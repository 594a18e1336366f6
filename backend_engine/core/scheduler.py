"""The scheduler: who runs in the next step.

First come, first served. Decoding sequences come first; what is left of the token budget goes to prompts, in chunks. A
request is admitted when a slot is free and pages for what it is known to hold; pages for what it samples are taken as
they are needed. When none is left, the newest request gives up its own and is computed again later, so the oldest
always goes on and nobody starves. Pages and slots that a step in flight still uses come back when it has ended.
"""

from __future__ import annotations

import logging

from backend_engine.core.budget import TokenBudget
from backend_engine.core.messages import Gauges
from backend_engine.core.pages import Pages
from backend_engine.core.request import Request
from backend_engine.core.slots import NewPage, Opening, Slots
from backend_engine.core.step import Chunk, RowMask, StepPlan
from backend_engine.core.waiting import WaitingLine
from protocol.timings import EngineState
from settings.schema import ModelSettings, SchedulerSettings
from tracing.clock import Clock

log = logging.getLogger(__name__)


class Scheduler:
    """Owns the queue and the running set; takes slots and pages at admission and gives them back at retirement.

    The queue is bounded by whoever adds to it (`EngineCore.take`).
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        model: ModelSettings,
        slots: Slots,
        pages: Pages,
        clock: Clock,
        *,
        reuses_slots: bool,
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
        self._reuses_slots = reuses_slots
        self._budget = TokenBudget(settings.max_num_batched_tokens)
        self._is_chunked = settings.enable_chunked_prefill
        self._is_caching = settings.enable_prefix_caching
        self._batch_wait_ns = round(model.batch_wait_ms * 1e6)
        self._alive: dict[str, Request] = {}  # not finished
        self._waiting = WaitingLine(settings.queue_warn_ms)
        self._running: dict[str, Request] = {}  # in order of arrival
        self._leaving: dict[str, Request] = {}  # out of the running set, with a step in flight
        self._opened: list[Request] = []
        self._new_pages: list[NewPage] = []
        self._prefix_queries = self._prefix_hits = self._preemptions = self._ooms = 0

    # -- what there is -----------------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """No request runs or waits."""
        return not self._alive

    @property
    def can_let_in(self) -> bool:
        """Whoever came now would be in the next step."""
        return len(self._waiting) < self._slots.free

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    def gauges(self) -> Gauges:
        """The state now."""
        return Gauges(
            running=self._slots.used,
            waiting=self.waiting,
            kv_used=self._pages.used,
            kv_pages=self._pages.count,
            kv_cached=self._pages.cached,
            prefix_queries_total=self._prefix_queries,
            prefix_hits_total=self._prefix_hits,
            evictions_total=self._pages.evictions,
            preemptions_total=self._preemptions,
            ooms_total=self._ooms,
        )

    def state(self, batch: int) -> EngineState:
        """The state now, as a request scheduled in a step of `batch` sequences is told."""
        return EngineState(self._slots.used, self.waiting, self._pages.used / self._pages.count, batch)

    def find(self, request_id: str) -> Request | None:
        """A request that is not finished."""
        return self._alive.get(request_id)

    # -- coming and going --------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Puts a request at the end of the queue."""
        self._alive[request.id] = request
        self._waiting.add(request)

    def withdraw(self, request: Request) -> None:
        """Takes a request out of the queue or the running set: no further step holds it. Slot and pages come back with
        `release_if_landed`, now or when the steps in flight have ended."""
        self._waiting.remove(request)
        if self._running.pop(request.id, None) is not None:
            self._leaving[request.id] = request

    def finish(self, request: Request) -> None:
        """A withdrawn request has had its last word; its id is free."""
        request.is_finished = True
        self._alive.pop(request.id, None)

    def release_if_landed(self, request: Request) -> bool:
        """Gives slot and pages back unless a step in flight still holds them. One that was preempted queues again."""
        if request.in_flight:
            return False
        if self._leaving.pop(request.id, None) is None:
            return True
        self._pages.give_back(request.pages)
        request.pages.clear()
        if request.slot is not None:
            self._slots.give_back(request.slot)
            request.slot = None
        if not request.is_finished and request.abort_asked_ns is None:
            request.start_over()
            self._waiting.put_back(request)
        return True

    def landed(self, request: Request) -> None:
        """A step with this request was committed: what it computed can be found by others."""
        if not self._is_caching or request.slot is None:
            return
        full = request.kv_tokens // self._pages.page_size
        if full > request.registered_pages:
            keys = request.keys.first(full)
            for at in range(request.registered_pages, full):
                self._pages.register(request.pages[at], keys[at])
            request.registered_pages = full

    # -- memory ------------------------------------------------------------------------------------------------------

    def ran_out_of_memory(self, plan: StepPlan) -> Request | None:
        """A step failed for want of memory: steps are at most half its size for a while. Returns the request that must
        go when it could not be any smaller."""
        self._ooms += 1
        self._budget.shrink(plan.tokens)
        can_shrink = len(plan.chunks) > 1 or (self._is_chunked and plan.tokens > 1)
        alive = [chunk.request for chunk in plan.chunks if not chunk.request.is_finished]
        return None if can_shrink or not alive else max(alive, key=lambda request: request.number)

    def went_well(self) -> None:
        """A step ended as it should."""
        self._budget.step_went_well()

    # -- the next step -----------------------------------------------------------------------------------------------

    def wait_until_ns(self) -> int | None:
        """When an idle engine that waits for company begins at the latest; None when it does not wait."""
        if self._batch_wait_ns == 0 or self._slots.used or not self._waiting.has_only_arrivals:
            return None
        if len(self._waiting) >= self._slots.count:
            return None
        oldest = next(iter(self._waiting))
        return oldest.queued_ns + self._batch_wait_ns

    def plan(self) -> StepPlan | None:
        """The next step, or None when nothing can run now."""
        began_ns = self._clock.mono_ns()
        self._waiting.warn_of_long_waits(began_ns, self.gauges, self._slots.count)
        wait_until_ns = self.wait_until_ns()
        if wait_until_ns is not None and began_ns < wait_until_ns:
            return None

        chunks = self._decodes()
        left = self._continue_prefills(chunks, self._budget.tokens - len(chunks))
        self._admit(chunks, left)
        opened, pages = self._changes(chunks)
        if not chunks:
            return None
        masks = tuple(
            RowMask(chunk.slot, mask.allowed)
            for chunk in chunks
            if chunk.samples and (mask := chunk.request.mask) is not None
        )
        tokens = sum(chunk.count for chunk in chunks)
        decodes = sum(chunk.decodes for chunk in chunks)
        return StepPlan(opened, pages, masks, tuple(chunks), decodes, tokens, self._clock.mono_ns() - began_ns)

    def _decodes(self) -> list[Chunk]:
        """One token of every sequence that has come so far, the oldest first."""
        chunks: list[Chunk] = []
        for request in tuple(self._running.values()):
            if len(chunks) >= self._budget.tokens:
                break
            if request.id not in self._running or not request.wants_decode:
                continue
            if self._grow(request, request.promised_kv_tokens + 1):
                chunks.append(self._chunk(request, 1, decodes=not request.must_open))
        return chunks

    def _continue_prefills(self, chunks: list[Chunk], left: int) -> int:
        """Adds the next pieces of admitted prompts; returns what is left of the budget."""
        for request in self._running.values():
            if request.prefill_left and self._has_room(request.prefill_left, chunks, left):
                left -= self._prefill(request, chunks, left)
        return left

    def _admit(self, chunks: list[Chunk], left: int) -> None:
        """Admits from the head of the queue while slots, pages and budget last, and adds their first pieces."""
        for request in self._waiting:
            if (self._is_chunked and left <= 0) or not self._slots.can_take():
                break
            if not request.may_sample:
                continue
            cached = self._take_known_pages(request)
            is_admitted = self._has_room(len(request.tokens) - cached, chunks, left) and self._take_first_pages(request)
            if not is_admitted:
                self._pages.give_back(request.pages)
                request.pages.clear()
                break
            self._enter(request, cached)
            left -= self._prefill(request, chunks, left)

    def _has_room(self, tokens: int, chunks: list[Chunk], left: int) -> bool:
        """In chunks, any budget will do. In one piece, the prompt must fit, or be the only prompt of its step:
        a prompt longer than the budget runs too, and one that nearly fills it isn't starved by those who decode."""
        if self._is_chunked:
            return left > 0
        return tokens <= left or all(chunk.decodes for chunk in chunks)

    def _prefill(self, request: Request, chunks: list[Chunk], left: int) -> int:
        """Adds one piece of a prompt; returns its tokens."""
        count = min(request.prefill_left, left) if self._is_chunked else request.prefill_left
        chunks.append(self._chunk(request, count, decodes=False))
        return count

    def _chunk(self, request: Request, count: int, *, decodes: bool) -> Chunk:
        assert request.slot is not None
        start = request.promised_kv_tokens
        request.promised_kv_tokens += count
        request.in_flight += 1
        samples = request.prefill_left == 0
        request.promised_outputs += samples
        return Chunk(request, request.slot.index, start, count, samples, decodes, request.epoch)

    def _changes(self, chunks: list[Chunk]) -> tuple[tuple[Opening, ...], tuple[NewPage, ...]]:
        """What the device must be told before this step: rows whole, and what was added to the others."""
        if not self._reuses_slots:
            self._new_pages.clear()
            return tuple(self._rebuilt(chunk) for chunk in chunks), ()
        opened = {request.id: request for request in self._opened if request.id in self._running}
        opened |= {chunk.request.id: chunk.request for chunk in chunks if chunk.request.must_open}
        written = {request.slot.index for request in opened.values() if request.slot is not None}
        pages = tuple(page for page in self._new_pages if page.slot not in written)
        rows = tuple(request.opening() for request in opened.values())
        for request in opened.values():
            request.must_open = False
        self._opened.clear()
        self._new_pages.clear()
        return rows, pages

    def _rebuilt(self, chunk: Chunk) -> Opening:
        """A row as the host knows it. One that a step in flight moves on (it was planned before this one, and what it
        promised is not void) keeps what that step makes of it."""
        request = chunk.request
        keeps_progress = request.in_flight > 1 and not request.must_open
        request.must_open = False
        opening = request.opening()
        return Opening(
            opening.slot,
            opening.tokens,
            opening.prompt_tokens,
            opening.most_tokens,
            opening.pages,
            opening.sampling,
            opening.seed,
            keeps_progress,
        )

    # -- pages -------------------------------------------------------------------------------------------------------

    def _take_known_pages(self, request: Request) -> int:
        """Shares the pages whose content is known already; returns the tokens in them. The last token is always
        computed, since its logits are what the first sample is drawn from."""
        if not self._is_caching:
            return 0
        full = (len(request.tokens) - 1) // self._pages.page_size
        found = self._pages.find(request.keys.first(full))
        self._pages.share(found)
        request.pages.extend(found)
        return len(found) * self._pages.page_size

    def _take_first_pages(self, request: Request) -> bool:
        """Takes the rest of the pages for what is known and for the first token sampled. Beside them a page for each
        that runs must be left, or the next steps would put out again whom this one lets in."""
        missing = self._pages.needed(self._tokens_to_hold(request, len(request.tokens))) - len(request.pages)
        if not self._pages.can_take(missing + len(self._running)):
            return False
        request.pages.extend(self._pages.take(missing))
        return True

    def _enter(self, request: Request, cached: int) -> None:
        self._waiting.remove(request)
        request.slot = self._slots.take(request.id)
        request.target_tokens = len(request.tokens)
        request.promised_kv_tokens = request.kv_tokens = cached
        request.registered_pages = cached // self._pages.page_size
        if request.cached_tokens is None:
            request.cached_tokens = cached
            self._prefix_queries += request.prompt_tokens if self._is_caching else 0
            self._prefix_hits += cached
        is_last = not self._running or next(reversed(self._running.values())).number < request.number
        self._running[request.id] = request
        if not is_last:
            self._running = dict(sorted(self._running.items(), key=lambda item: item[1].number))
        self._opened.append(request)

    def _tokens_to_hold(self, request: Request, computed: int) -> int:
        """Tokens that pages are needed for once `computed` are: those and the one sampled after them, whose place the
        slot kernel works out at once. The last token of a sequence is never computed, so it needs no place."""
        return min(computed + 1, request.most_tokens - 1)

    def _grow(self, request: Request, computed: int) -> bool:
        """Takes the pages that a step needs; puts out the newest requests while there are not enough. False when this
        one does not run in the next step."""
        missing = self._pages.needed(self._tokens_to_hold(request, computed)) - len(request.pages)
        if missing <= 0:
            return True
        while not self._pages.can_take(missing):
            if self._leaving:
                return False  # their pages come back with the step in flight: putting out more would help nobody
            victim = next(reversed(self._running.values()))
            self._put_out(victim)
            if victim is request:
                return False
        assert request.slot is not None
        for page in self._pages.take(missing):
            self._new_pages.append(NewPage(request.slot.index, len(request.pages), page))
            request.pages.append(page)
        return True

    def _put_out(self, request: Request) -> None:
        log.info("request %s is put out of the batch until KV pages are free again", request.id)
        self._preemptions += 1
        request.preempted(self._clock.mono_ns())
        self.withdraw(request)
        self.release_if_landed(request)
