"""Adapters: what engines of any make say of a request's inside, brought into one form.

In band (`timings` in the answer) the relay reads it already. Here are the other ways: spans that carry
`gen_ai.latency.*` or stages of their own, and the `Server-Timing` header. The best told is used, in this order.
"""

from tracing.observer.adapters.emitted import evidence_of_spans, is_engine_span, tells_all
from tracing.observer.adapters.evidence import Evidence, retold
from tracing.observer.adapters.placing import centred
from tracing.observer.adapters.server_timing import evidence_of_header
from tracing.observer.adapters.stand_ins import stand_ins

__all__ = [
    "Evidence",
    "centred",
    "evidence_of_header",
    "evidence_of_spans",
    "is_engine_span",
    "retold",
    "stand_ins",
    "tells_all",
]
