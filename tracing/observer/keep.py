"""The keep rule: whose spans and exemplars are kept. Decided once, at the end of the request.

Errors, cancellations, everything that missed an objective and the slowest of each model in a sliding window are kept,
and a share of the rest by a hash of the trace id, so that every gateway that sees the same trace decides alike. A
stranger without a valid key cannot fill the store: authentication errors fall under the share.
"""

from __future__ import annotations

import hashlib

from tracing.clock import Clock
from tracing.ledger import Ledger, Outcome
from tracing.observer.labels import Bounded
from tracing.observer.rows import slowness
from tracing.observer.slo import Objectives, tpot_is_good, ttft_is_good
from tracing.stages import Timeline

MAX_MODELS = 64
_UNREMARKABLE = (Outcome.OK, Outcome.AUTH_ERROR)


class Slowest:
    """Whether a request is among the `count` slowest of its kind in the last `window_seconds`, as they end."""

    def __init__(self, clock: Clock, *, count: int, window_seconds: float) -> None:
        self._clock = clock
        self._count = count
        self._window_ns = round(window_seconds * 1e9)
        self._seen: dict[tuple[str, bool], list[tuple[float, int]]] = {}
        """(slowness in seconds, when it ended) of the slowest, in no order."""

    def takes(self, model: str, stream: bool, seconds: float) -> bool:
        """Asks for a request that ends now, and remembers it. Streams and whole answers are not compared."""
        if not self._count:
            return False
        now = self._clock.mono_ns()
        slowest = [entry for entry in self._seen.get((model, stream), ()) if entry[1] > now - self._window_ns]
        is_among = len(slowest) < self._count
        if not is_among:
            fastest = min(slowest)
            is_among = seconds > fastest[0]
            if is_among:
                slowest.remove(fastest)
        if is_among:
            slowest.append((seconds, now))
        self._seen[model, stream] = slowest
        return is_among


class KeepRule:
    """`share` is 0 to 1."""

    def __init__(self, objectives: Objectives, share: float, slowest: Slowest) -> None:
        self._objectives = objectives
        self._share_limit = round(share * 2**64)
        self._slowest = slowest
        self._models = Bounded(MAX_MODELS)

    def keeps(self, ledger: Ledger, timeline: Timeline) -> bool:
        """Whether the spans of a request that ended are kept. Ask once for each."""
        seconds = slowness(timeline)
        (model,) = self._models.keep(ledger.model)
        # Asked in any case, so that the slowest are the slowest of all and not of those that nothing else keeps.
        is_slow = (
            seconds is not None
            and ledger.outcome is not Outcome.AUTH_ERROR
            and self._slowest.takes(model, ledger.stream, seconds)
        )
        return (
            is_slow
            or ledger.outcome not in _UNREMARKABLE
            or self.in_share(ledger.trace_id)
            or self._missed_an_objective(ledger, timeline)
        )

    def keeps_for_sure(self, trace_id: str, model: str, ttft_seconds: float) -> bool:
        """What is known already when the first token is out: True is final, False may still change."""
        limit_ms = self._objectives.of(model).ttft_ms
        return bool(trace_id) and (self.in_share(trace_id) or ttft_seconds * 1e3 > limit_ms)

    def in_share(self, trace_id: str) -> bool:
        """Whether this trace is in the hashed share."""
        digest = hashlib.blake2b(trace_id.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") < self._share_limit

    def _missed_an_objective(self, ledger: Ledger, timeline: Timeline) -> bool:
        objective = self._objectives.of(ledger.model)
        return ttft_is_good(ledger, timeline, objective) is False or tpot_is_good(ledger, timeline, objective) is False
