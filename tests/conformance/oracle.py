"""What must be true of a request, worked out from the witnesses of the upstream and of the client, not from our code.

Instants: what the gateway did with an event lies between the moment before the upstream wrote it and the moment after
the client read it. All three clocks are one, so these bounds hold on any machine, however busy, without a tolerance.
"""

from __future__ import annotations

from expectation import Expect, Played
from oracle_marks import check_marks
from oracle_samples import check_samples
from oracle_spans import check_spans
from oracle_stages import check_stages


def check_all(played: Played, expect: Expect, before: dict[str, float]) -> None:
    """One request by itself: marks, stages, samples, spans. `before`: the samples before it."""
    check_request(played, expect)
    check_samples(played, expect, before)


def check_request(played: Played, expect: Expect) -> None:
    """The same without the samples, for requests among others."""
    check_marks(played, expect)
    check_stages(played, expect)
    check_spans(played, expect)
