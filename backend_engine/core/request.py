"""A request inside the core: how far it has come, and the marks of its time."""

from __future__ import annotations

from bisect import bisect_right

from backend_engine.core.messages import Finished, Mask, Sampling, Scheduled, Submit
from backend_engine.core.prefix import PageKeys
from backend_engine.core.slots import Opening, Slot
from protocol.timings import EngineState


class Request:
    """One request from Submit to Finished. The scheduler moves `promised_*` on when it plans; commits move the rest.

    queue + prefill + decode = last token - queued holds exactly, since each mark ends one interval and begins the next.
    """

    def __init__(self, submit: Submit, seed: int, max_model_len: int, page_size: int, number: int) -> None:
        """`number` counts arrivals."""
        self.id = submit.request_id
        self.number = number
        self.prompt_tokens = len(submit.prompt)
        self.tokens = list(submit.prompt)
        """Prompt, and every token of the answer whose step was committed."""
        self.sampling: Sampling = submit.sampling
        self.seed = seed
        self.queued_ns = submit.queued_ns
        self.most_tokens = min(len(submit.prompt) + submit.sampling.max_tokens, max_model_len)
        """Prompt and answer together are never longer than this."""
        self.mask: Mask | None = None
        """The newest that came, of a request whose sampling is masked."""

        self.slot: Slot | None = None
        self.pages: list[int] = []
        self.keys = PageKeys(self.tokens, page_size)
        self.registered_pages = 0
        self.target_tokens = len(self.tokens)
        """Tokens that were known when it got its slot, to be computed before it decodes."""
        self.promised_kv_tokens = 0
        """Tokens whose keys and values are in the cache once every planned step has ended."""
        self.promised_outputs = 0
        """Tokens sampled once every planned step has ended."""
        self.kv_tokens = 0
        """Tokens whose keys and values are in the cache for sure."""
        self.in_flight = 0
        """Planned steps that hold it and are not committed. Slot and pages stay its own until there is none."""
        self.epoch = 0
        """Chunks of an earlier epoch tell nothing: it was rolled back, and their steps ran on what is void."""
        self.must_open = False
        """Its row must be written anew before the next step."""
        self.is_finished = False
        """Its last word was said."""
        self.has_ended = False
        """Its last token was sampled: what later steps sample for it is dropped."""
        self.abort_asked_ns: int | None = None

        self.outputs = 0
        self.scheduled_ns: int | None = None
        self.prefill_end_ns: int | None = None
        self.state: EngineState | None = None
        self.cached_tokens: int | None = None
        """Prompt tokens found in the prefix cache at the first admission."""
        self.chunks = 0
        self.steps = 0
        self.batch_sum = 0
        self.gap_ns = 0
        self.preempted_ns = 0
        self.preempted_at_ns: list[int] = []
        self._is_out = False
        self._token_ends_ns: list[int] = []

    # -- what comes next ---------------------------------------------------------------------------------------------

    @property
    def prefill_left(self) -> int:
        """Known tokens that no step holds yet."""
        return max(0, self.target_tokens - self.promised_kv_tokens)

    @property
    def wants_decode(self) -> bool:
        """Its next token needs a decode step: what was known is computed, the length limit is not promised away, and
        it is known what may come next."""
        return (
            self.promised_kv_tokens >= self.target_tokens
            and self.prompt_tokens + self.promised_outputs < self.most_tokens
            and self.may_sample
        )

    @property
    def may_sample(self) -> bool:
        """Whether the next token is free, or its mask is there."""
        return not self.sampling.is_masked or (self.mask is not None and self.mask.output == self.promised_outputs)

    def opening(self) -> Opening:
        """Its row, as it is known now."""
        assert self.slot is not None
        return Opening(
            slot=self.slot.index,
            tokens=self.tokens.copy(),
            prompt_tokens=self.prompt_tokens,
            most_tokens=self.most_tokens,
            pages=self.pages.copy(),
            sampling=self.sampling,
            seed=self.seed,
        )

    def start_over(self) -> None:
        """Slot and pages are gone; all that is known must be computed again."""
        self.target_tokens = len(self.tokens)
        self.registered_pages = 0
        self.kv_tokens = 0
        self.roll_back()

    def roll_back(self) -> None:
        """Forgets what steps in flight had promised."""
        self.epoch += 1
        self.promised_kv_tokens = self.kv_tokens
        self.promised_outputs = self.outputs
        self.must_open = self.slot is not None

    # -- what happened -----------------------------------------------------------------------------------------------

    @property
    def last_token_ns(self) -> int | None:
        """End of the step that sampled the last token."""
        return self._token_ends_ns[-1] if self._token_ends_ns else None

    def began(self, start_ns: int, state: EngineState) -> None:
        """A step with a piece of what it had to compute started at `start_ns`; the first one ends its queue."""
        if self.scheduled_ns is None:
            self.scheduled_ns = start_ns
            self.state = state
        self.took_up(start_ns)
        if self.prefill_end_ns is None:
            self.chunks += 1

    def decoded(self, batch: int, gap_ns: int | None) -> None:
        """A step of `batch` sequences sampled a token after its first, `gap_ns` after the step before."""
        self.steps += 1
        self.batch_sum += batch
        self.gap_ns += gap_ns or 0

    def sampled(self, token: int, end_ns: int) -> str | None:
        """Counts a token; returns why the request ends with it, or None."""
        self.outputs += 1
        self.tokens.append(token)
        self._token_ends_ns.append(end_ns)
        if self.prefill_end_ns is None:
            self.prefill_end_ns = end_ns
        reason = "length" if self.prompt_tokens + self.outputs >= self.most_tokens else None
        reason = "stop" if token in self.sampling.stop_token_ids else reason
        self.has_ended = reason is not None
        return reason

    def preempted(self, at_ns: int) -> None:
        """It is to lose slot and pages."""
        self.preempted_at_ns.append(at_ns)
        self._is_out = True

    def took_up(self, at_ns: int) -> None:
        """It runs again, or never will."""
        if self._is_out:
            self.preempted_ns += max(0, at_ns - self.preempted_at_ns[-1])
            self._is_out = False

    def scheduled(self) -> Scheduled:
        """What is told with the first token."""
        assert self.scheduled_ns is not None
        assert self.prefill_end_ns is not None
        assert self.state is not None
        return Scheduled(self.scheduled_ns, self.prefill_end_ns, self.chunks, self.cached_tokens or 0, self.state)

    def finished(
        self,
        reason: str,
        ended_ns: int,
        *,
        error: str | None = None,
        error_code: str | None = None,
    ) -> Finished:
        """What is told at the end. Tokens sampled after an abort was asked for were made in vain."""
        self.took_up(ended_ns)
        asked_ns = self.abort_asked_ns
        wasted = 0 if asked_ns is None else self.outputs - bisect_right(self._token_ends_ns, asked_ns)
        return Finished(
            reason=reason,
            last_token_ns=self.last_token_ns,
            ended_ns=ended_ns,
            output_tokens=self.outputs,
            steps=self.steps,
            batch_sum=self.batch_sum,
            gap_ns=self.gap_ns,
            wasted_tokens=wasted,
            preemptions=len(self.preempted_at_ns),
            preempted_ns=self.preempted_ns,
            preempted_at_ns=tuple(self.preempted_at_ns),
            error=error,
            error_code=error_code,
            scheduled_ns=self.scheduled_ns,
        )
