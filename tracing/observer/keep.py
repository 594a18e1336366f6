"""The keep rule: whose spans and exemplars are kept. Decided once, at the end of the request.

Errors, cancellations and everything over its objective are kept, and a share of the rest by a hash of the trace id, so
that every gateway that sees the same trace decides alike. A stranger without a valid key cannot fill the store:
authentication errors fall under the share.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from settings.schema import SloSettings
from tracing.ledger import Ledger, Outcome
from tracing.stages import Timeline

_UNREMARKABLE = (Outcome.OK, Outcome.AUTH_ERROR)


class KeepRule:
    """`slo` by model name, with `default` for the rest; `share` is 0 to 1."""

    def __init__(self, slo: Mapping[str, SloSettings], share: float) -> None:
        self._slo = slo
        self._default = slo.get("default", SloSettings())
        self._share_limit = round(share * 2**64)

    def keeps(self, ledger: Ledger, timeline: Timeline) -> bool:
        """Whether the spans of a request that ended are kept."""
        return (
            self.in_share(ledger.trace_id)
            or ledger.outcome not in _UNREMARKABLE
            or self._over_objective(ledger, timeline)
        )

    def keeps_for_sure(self, trace_id: str, model: str, ttft_seconds: float) -> bool:
        """What is known already when the first token is out: True is final, False may still change."""
        return bool(trace_id) and (self.in_share(trace_id) or ttft_seconds * 1e3 > self._objective(model).ttft_ms)

    def in_share(self, trace_id: str) -> bool:
        """Whether this trace is in the hashed share."""
        digest = hashlib.blake2b(trace_id.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") < self._share_limit

    def _objective(self, model: str) -> SloSettings:
        return self._slo.get(model, self._default)

    def _over_objective(self, ledger: Ledger, timeline: Timeline) -> bool:
        objective = self._objective(ledger.model)
        ttft = timeline.ttft
        if ttft is None and ledger.stream:
            ttft = timeline.e2e  # a stream that never had a first token waited to its end
        return (ttft is not None and ttft * 1e3 > objective.ttft_ms) or (
            timeline.tpot is not None and timeline.tpot * 1e3 > objective.tpot_ms
        )
