"""A request inside the core: how far it has come, and the marks of its time."""

from __future__ import annotations

from bisect import bisect_right

from backend_engine.core.messages import Finished, Sampling, Scheduled, Submit
from backend_engine.core.slots import Slot
from protocol.timings import EngineState


class Request:
    """One request from Submit to Finished. The scheduler moves `promised_*` on when it plans; commits move the rest.

    queue + prefill + decode = last token - queued holds exactly, since each mark ends one interval and begins the next.
    """

    def __init__(self, submit: Submit, seed: int, max_model_len: int) -> None:
        self.id = submit.request_id
        self.prompt = submit.prompt
        self.sampling: Sampling = submit.sampling
        self.seed = seed
        self.queued_ns = submit.queued_ns
        self.most_tokens = min(len(submit.prompt) + submit.sampling.max_tokens, max_model_len)
        """Prompt and answer together are never longer than this."""
        self.slot: Slot | None = None
        self.promised_kv_tokens = 0
        """Tokens whose keys and values are in the cache once every planned step has ended."""
        self.promised_outputs = 0
        """Tokens sampled once every planned step has ended."""

        self.outputs = 0
        self.scheduled_ns: int | None = None
        self.prefill_end_ns: int | None = None
        self.state: EngineState | None = None
        self.chunks = 0
        self.steps = 0
        self.batch_sum = 0
        self.gap_ns = 0
        self._token_ends_ns: list[int] = []

    @property
    def prefill_left(self) -> int:
        """Prompt tokens that no step holds yet."""
        return max(0, len(self.prompt) - self.promised_kv_tokens)

    @property
    def wants_decode(self) -> bool:
        """Its next token needs a decode step: the prompt is done and the length limit is not promised away."""
        return self.prefill_left == 0 and len(self.prompt) + self.promised_outputs < self.most_tokens

    @property
    def last_token_ns(self) -> int | None:
        """End of the step that sampled the last token."""
        return self._token_ends_ns[-1] if self._token_ends_ns else None

    def began(self, start_ns: int, state: EngineState) -> None:
        """The step with its first prefill chunk started at `start_ns`."""
        if self.scheduled_ns is None:
            self.scheduled_ns = start_ns
            self.state = state

    def decoded(self, batch: int, gap_ns: int | None) -> None:
        """A decode step of `batch` sequences held it, `gap_ns` after the step before."""
        self.steps += 1
        self.batch_sum += batch
        self.gap_ns += gap_ns or 0

    def sampled(self, token: int, end_ns: int) -> str | None:
        """Counts a token; returns why the request ends with it, or None."""
        self.outputs += 1
        self._token_ends_ns.append(end_ns)
        if self.prefill_end_ns is None:
            self.prefill_end_ns = end_ns
        if token in self.sampling.stop_token_ids:
            return "stop"
        return "length" if len(self.prompt) + self.outputs >= self.most_tokens else None

    def scheduled(self) -> Scheduled:
        """What is told with the first token."""
        assert self.scheduled_ns is not None
        assert self.prefill_end_ns is not None
        assert self.state is not None
        return Scheduled(self.scheduled_ns, self.prefill_end_ns, self.chunks, 0, self.state)

    def finished(
        self,
        reason: str,
        ended_ns: int,
        *,
        asked_ns: int | None = None,
        error: str | None = None,
        error_code: str | None = None,
    ) -> Finished:
        """What is told at the end. Tokens sampled after `asked_ns` (of an abort) were made in vain."""
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
            error=error,
            error_code=error_code,
            scheduled_ns=self.scheduled_ns,
        )
